"""What `show` says of a plan: few lines of rejections, one direction of ratios, and what a budget left open."""

from __future__ import annotations

import msgspec

from plans.plan import Plan, Rejected
from plans.show import plan_text
from plans.show.rejected import MOST_KINDS, rejected_lines
from tests.plans.samples import sample_plan


def with_rejected(*rows: Rejected) -> Plan:
    return msgspec.structs.replace(sample_plan(), id="ab" * 10, rejected=rows)


def test_rejections_of_one_kind_are_one_line_with_the_closest_candidate() -> None:
    slower = [
        Rejected(f"native d{n}", "cost", f"predicted {n}.5 times the best of 0.9 s") for n in (12, 4, 9)
    ]
    family = Rejected("native u1024", "cost", "no prompt fills a step", 7)
    lines = rejected_lines(with_rejected(*slower, family))
    assert lines[0].startswith("  10 other candidates were rejected;")
    assert "placewright show abababababab --json" in lines[0]
    assert lines[1:] == [
        "      7  cost: native u1024: no prompt fills a step",
        "      3  cost: native d4: predicted 4.5 times the best of 0.9 s",
    ]


def test_reasons_that_name_other_candidates_are_of_one_kind() -> None:
    rows = [
        Rejected("native d1 mmap", "cost", "no faster than native d2, which takes less"),
        Rejected("native d2 mmap", "cost", "no faster than native d1 mmap, which takes less"),
        Rejected("native d2", "memory", "needs 1,024 MiB"),
    ]
    assert [line.split()[0] for line in rejected_lines(with_rejected(*rows))[1:]] == ["2", "1"]


def test_an_engine_that_failed_is_told_before_what_is_common() -> None:
    common = [
        Rejected(f"native {letter}", "cost", f"a reason {letter}", 50) for letter in "abcdefgh"[:MOST_KINDS]
    ]
    lines = rejected_lines(with_rejected(*common, Rejected("llama-server d2", "engine", "no library")))
    assert len(lines) == 1 + MOST_KINDS
    assert lines[1].split() == ["1", "engine:", "llama-server", "d2:", "no", "library"]


def test_nothing_rejected_is_said() -> None:
    assert rejected_lines(with_rejected()) == ["  no other candidate was rejected"]


def test_what_the_budget_left_open_stands_there_with_the_remedy() -> None:
    plan = sample_plan()
    assert "undecided" not in plan_text(plan)
    evidence = msgspec.structs.replace(plan.evidence, undecided=("native d1", "llama-server d2"))
    line = next(
        line
        for line in plan_text(msgspec.structs.replace(plan, evidence=evidence)).splitlines()
        if "undecided" in line
    )
    assert "the budget of 20 s ended before" in line and "native d1, llama-server d2" in line
    assert line.endswith("plan again with --replan and a larger --budget-s")


def test_the_ratio_says_what_it_is_a_ratio_of() -> None:
    assert "time/chosen's" in plan_text(sample_plan())
