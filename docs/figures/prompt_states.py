"""Draw the states of a prompt in the ledger.

python docs/figures/prompt_states.py > docs/figures/prompt_states.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "A prompt is leased by a rollout worker, held once its group is committed, drawn into a "
    "rollout batch, and trained. A lease that ends early returns it to the next worker."
)
STATES = (
    (("next prompt", "of the epoch's order"), "plain"),
    (("leased", "a worker generates"), "orange"),
    (("held", "its group is committed"), "blue"),
    (("training", "its batch is selected"), "blue"),
    (("trained", "counted, once an epoch"), "green"),
)
STEPS = ("lease", "commit", "select", "next")
WIDTH = 150
GAP = 62


def main() -> None:
    picture = Drawing(1038, 288, LABEL)
    for number, (words, kind) in enumerate(STATES):
        x = 20 + (WIDTH + GAP) * number
        picture.labelled_box(x, 60, WIDTH, 60, words, kind)
        if number < len(STEPS):
            picture.arrow(f"M{x + WIDTH} 90H{x + WIDTH + GAP - 4}")
            picture.text(x + WIDTH + GAP / 2 - 2, 81, STEPS[number], "small")
    picture.text(20, 32, "a prompt in the ledger", "title", "start")
    leased = 20 + WIDTH + GAP
    picture.labelled_box(leased, 180, WIDTH, 60, ("returned", "goes to the next worker"), "plain")
    picture.back_arrow(f"M{leased + 55} 120V176")
    picture.arrow(f"M{leased + 95} 180V124")
    picture.text(leased + 48, 145, "the worker fails or", "small", "end")
    picture.text(leased + 48, 161, "dies, the lease expires", "small", "end")
    picture.text(leased + 104, 154, "lease", "small", "start")
    held = leased + WIDTH + GAP
    picture.labelled_box(held, 180, WIDTH, 60, ("dropped", "counted by reason"), "plain")
    picture.back_arrow(f"M{held + 75} 120V176")
    picture.back_arrow(f"M{leased + WIDTH} 210H{held - 4}")
    picture.text(held + 84, 154, "too old, or rejected by a rule", "small", "start")
    picture.text(held - GAP / 2, 229, "attempts", "small")
    rule = "issued = trained + training + held + leased + returned + dropped, at every moment"
    picture.text(20, 272, rule, "small", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
