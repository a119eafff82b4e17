"""Why candidates lost, in a few lines: one for each kind of reason, with the candidate that came closest.

Hundreds of candidates lose for a handful of reasons that differ in their numbers and in whom they lost to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from plans.plan import Plan, Rejected

MOST_KINDS = 5
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def rejected_lines(plan: Plan) -> list[str]:
    """The most common kinds of reason; an engine that failed comes before all."""
    if not plan.rejected:
        return ["  no other candidate was rejected"]
    groups = sorted(_kinds(plan), key=lambda rows: (rows[0].stage != "engine", -_count(rows)))
    total, shown = _count(plan.rejected), groups[:MOST_KINDS]
    head = f"  {total} other candidates were rejected"
    if total > len(shown):
        head += "; the commonest reasons, each with the candidate that came closest"
    lines = [f"{head} (all: placewright show {plan.id[:12]} --json):"]
    for rows in shown:
        closest = min(rows, key=_numbers)
        lines.append(f"  {_count(rows):>5}  {closest.stage}: {closest.candidate}: {closest.reason}")
    return lines


def _count(rows: Iterable[Rejected]) -> int:
    return sum(row.count for row in rows)


def _kinds(plan: Plan) -> list[list[Rejected]]:
    """Rejections of one stage whose reasons differ in nothing but numbers and names of candidates."""
    labels = {row.candidate for row in plan.rejected} | {row.candidate for row in plan.evidence.candidates}
    longest_first = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
    label_pattern = re.compile(longest_first)
    groups: dict[tuple[str, str], list[Rejected]] = {}
    for row in plan.rejected:
        kind = _NUMBER.sub("#", label_pattern.sub("@", row.reason))
        groups.setdefault((row.stage, kind), []).append(row)
    return list(groups.values())


def _numbers(row: Rejected) -> list[float]:
    """Of a reason, in order: in all of them less (of time, of bytes) is closer to having been chosen."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(row.reason)]
