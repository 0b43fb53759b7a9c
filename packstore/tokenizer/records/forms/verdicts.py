"""Two answers, and the verdict, the votes or the scores that say which one is better."""

from __future__ import annotations

from packstore.tokenizer.records.forms import Fields, form
from packstore.tokenizer.records.forms.helpers import by_sign
from packstore.tokenizer.records.reading import Drop, Pair
from packstore.tokenizer.records.types import number, text, turns


@form(
    "preference",
    {"context": turns, "response1": text, "response2": text, "overall_preference": number},
    leaves=("domain", "language", "individual_preference"),
    as_chat=True,
    sets=("nvidia/HelpSteer3",),
    source="https://huggingface.co/datasets/nvidia/HelpSteer3",
)
def helpsteer3(fields: Fields) -> Pair | Drop:
    """Two answers and a preference from -3 (the first) to 3 (the second)."""
    return by_sign(
        fields["context"],
        fields["response1"],
        fields["response2"],
        fields["overall_preference"],
    )
