"""Cards, reports and plans as text and as JSON-ready values. Pure: it reads nothing and prints nothing."""

from plans.show.card import card_builtins, card_text
from plans.show.machine import report_text
from plans.show.plan import CANDIDATE_KEY, listing_builtins, listing_text, plan_text, undecided_text
from plans.show.text import number_text, rate_text, table

__all__ = [
    "CANDIDATE_KEY",
    "card_builtins",
    "card_text",
    "listing_builtins",
    "listing_text",
    "number_text",
    "plan_text",
    "rate_text",
    "report_text",
    "table",
    "undecided_text",
]
