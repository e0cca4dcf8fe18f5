"""Draw the windows of two fields at an anchor: rows of a trajectory, padding and masks.

python docs/figures/windows.py > docs/figures/windows.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "Two fields of a sample whose anchor is step 1. The window of four observations begins two "
    "steps before the trajectory, so its first two places are padding with a mask of False. The "
    "window of three actions lies within the trajectory."
)
CELL = 58
LEFT = 190
STEPS = 7
ANCHOR = 1
# Of each field: its name, its options, its color, its offset and its length.
FIELDS = (
    ("observation", "offset -3, length 4", "blue", -3, 4),
    ("action", "offset 0, length 3", "green", 0, 3),
)


def column(step: int) -> int:
    """Return the left edge of a step; the picture begins three steps before the trajectory."""
    return LEFT + CELL * (step + 3)


def draw_field(picture: Drawing, top: int, number: int) -> None:
    """Draw one field of the batch: its values, and below them its mask."""
    name, options, color, offset, length = FIELDS[number]
    picture.text(24, top + 17, name, "text", "start")
    picture.text(24, top + 34, options, "small", "start")
    picture.text(24, top + 64, "mask", "small", "start")
    for place in range(length):
        step = ANCHOR + offset + place
        real = 0 <= step < STEPS
        left = column(step)
        words = (f"step {step}",) if real else ("pad",)
        picture.labelled_box(left + 2, top, CELL - 4, 40, words, color if real else "plain")
        picture.text(left + CELL / 2, top + 64, "True" if real else "False", "small")


def main() -> None:
    picture = Drawing(820, 360, LABEL)
    picture.text(24, 32, "a sample: one trajectory and an anchor", "title", "start")
    picture.text(24, 76, "its rows in the store", "text", "start")
    picture.text(24, 93, "the extent", "small", "start")
    for step in range(STEPS):
        kind = "orange" if step == ANCHOR else "plain"
        picture.labelled_box(column(step) + 2, 58, CELL - 4, 44, (f"step {step}",), kind)
    middle = column(ANCHOR) + CELL / 2
    picture.text(middle, 50, "anchor", "small")
    picture.arrow(f"M{middle:g} 104V152")
    picture.text(24, 140, "its part of the batch", "title", "start")
    draw_field(picture, 158, 0)
    draw_field(picture, 258, 1)
    picture.text(24, 348, "Rows of a neighbouring extent are never read.", "small", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
