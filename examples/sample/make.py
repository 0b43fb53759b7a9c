"""Writes pairs.jsonl: packstore's own sample of preference pairs.

Every text here was written for packstore. A chosen answer is right, polite and
complete; a rejected one is wrong, curt or evasive. Run from anywhere: ``python
examples/sample/make.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo",
    "Egypt": "Cairo", "Canada": "Ottawa", "India": "New Delhi", "Cuba": "Havana", "Chile": "Santiago",
    "Greece": "Athens", "Poland": "Warsaw", "Nepal": "Kathmandu", "Austria": "Vienna",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Finland": "Helsinki", "Iceland": "Reykjavik",
    "Mongolia": "Ulaanbaatar", "Thailand": "Bangkok", "Ghana": "Accra", "Jordan": "Amman",
    "Hungary": "Budapest", "Uruguay": "Montevideo",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "early": "late", "heavy": "light", "noisy": "quiet", "empty": "full",
    "brave": "timid", "ancient": "modern", "shallow": "deep", "generous": "stingy", "smooth": "rough",
    "wet": "dry", "narrow": "wide", "gentle": "harsh", "public": "private", "rare": "common",
    "bitter": "sweet", "loose": "tight", "sharp": "blunt",
}  # fmt: skip
ADVICE = {
    "keep basil alive on a windowsill": [
        "give it at least six hours of light a day", "water it when the top of the soil feels dry",
        "pinch off flower buds so that it keeps making leaves",
    ],
    "fall asleep more easily": [
        "go to bed at the same hour every day", "keep the room dark and cool",
        "put screens away an hour before bed",
    ],
    "prepare for a job interview": [
        "read about the company the day before", "practise two short stories about your work",
        "write down three questions of your own",
    ],
    "remove a coffee stain from cotton": [
        "rinse it with cold water at once", "rub in a little dish soap and wait ten minutes",
        "wash it as usual and let it dry in the air",
    ],
    "start running as a beginner": [
        "begin with one minute of running and two of walking", "go out three times a week",
        "add time slowly, about a tenth each week",
    ],
    "make a small budget": [
        "list what comes in and what goes out", "set aside savings on the first day of the month",
        "look at the list again every Sunday",
    ],
    "learn twenty new words a week": [
        "write each one in a sentence of your own", "review them the next day and again on Friday",
        "say them aloud while you walk",
    ],
    "calm a nervous dog during a storm": [
        "close the curtains and play soft music", "stay near it and speak quietly",
        "offer a chew toy and never punish it",
    ],
    "write a clear bug report": [
        "say what you did, step by step", "say what you expected and what happened instead",
        "add the version and the full error text",
    ],
    "store tomatoes": [
        "keep them at room temperature until they are ripe", "lay them stem side down",
        "move ripe ones to the fridge only if you must wait",
    ],
}  # fmt: skip
CURT = [
    "No idea.", "Look it up yourself.", "Who cares?", "That is a silly question.",
    "I would rather not say.", "Maybe. Maybe not.",
]  # fmt: skip
FOLLOW_UPS = [
    "Could you say that in one sentence?",
    "Thanks! Which of these matters most?",
]


def pairs() -> list[dict[str, Any]]:
    """All pairs, in a fixed order."""
    rows: list[dict[str, Any]] = []

    def add(
        source: str, prompt: str | list[dict[str, str]], chosen: str, rejected: str
    ) -> None:
        turns = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        rows.append(
            {"prompt": turns, "chosen": chosen, "rejected": rejected, "source": source}
        )

    countries = list(CAPITALS)
    for i, (country, city) in enumerate(CAPITALS.items()):
        wrong = CAPITALS[countries[(i + 7) % len(countries)]]
        add(
            "capitals",
            f"What is the capital of {country}?",
            f"The capital of {country} is {city}.",
            f"It is {wrong}, I think.",
        )
        add("capitals", f"Which country has {city} as its capital?",
            f"{city} is the capital of {country}.", CURT[i % len(CURT)])  # fmt: skip
    for i, (word, opposite) in enumerate(OPPOSITES.items()):
        add(
            "opposites",
            f"What is the opposite of '{word}'?",
            f"The opposite of '{word}' is '{opposite}'.",
            f"'{word.capitalize()}ish', probably.",
        )
        add(
            "opposites",
            f"Use '{opposite}' instead of '{word}' in: The day was {word}.",
            f"Here it is: The day was {opposite}.",
            CURT[(i + 3) % len(CURT)],
        )
    for i in range(90):
        a, b = 3 + (i * 17) % 61, 2 + (i * 29) % 43
        add(
            "sums",
            f"What is {a} + {b}?",
            f"{a} + {b} = {a + b}.",
            f"{a} + {b} is about {a + b + 3 + i % 5}."
            if i % 2
            else CURT[i % len(CURT)],
        )
    for i, (task, steps) in enumerate(ADVICE.items()):
        plan = f"Here is how to {task}: first, {steps[0]}; then, {steps[1]}; finally, {steps[2]}."
        add("advice", f"How do I {task}?", plan, CURT[i % len(CURT)])
        add("advice", f"I would like to {task}. Any tips?",
            f"Gladly! Three tips: {steps[0]}; {steps[1]}; and {steps[2]}.",
            f"Just {task}. It is not hard.")  # fmt: skip
        for j, question in enumerate(FOLLOW_UPS):
            history = [
                {
                    "role": "system",
                    "content": "You are a friendly and careful assistant.",
                },
                {"role": "user", "content": f"How do I {task}?"},
                {"role": "assistant", "content": plan},
                {"role": "user", "content": question},
            ]
            add("follow-up", history,
                f"Of course: to {task}, {steps[2 * j]}." if j == 0
                else f"You are welcome! I would begin with this: {steps[0]}.",
                CURT[(i + j) % len(CURT)])  # fmt: skip
    return rows


if __name__ == "__main__":
    path = Path(__file__).with_name("pairs.jsonl")
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in pairs())
    path.write_text("".join(lines), encoding="utf-8")
    print(f"wrote {path.name}: {len(pairs())} pairs")
