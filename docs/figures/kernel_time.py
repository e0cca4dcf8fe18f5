"""Draw the parts of a small kernel's predicted time, to scale.

python docs/figures/kernel_time.py > docs/figures/kernel_time.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "The predicted time of the n-step kernel: 1.5 us for the node, two loads of 0.4 us "
    "that wait for each other, and 0.2 us of additions in order, 2.5 us together."
)
# Each part: its words, what it stands for, its time in us and its color.
PARTS = (
    ("node", "launch and drain", 1.5, "gray"),
    ("load", "resolution", 0.4, "blue"),
    ("load", "rewards", 0.4, "blue"),
    ("sums", "", 0.2, "green"),
)
SCALE = 300  # pixels of a microsecond
NOTES = (
    "gray: once for each node of the graph",
    "blue: a load that needs the result of the load before it; independent loads overlap",
    "green: operations whose order is part of the result",
)


def main() -> None:
    picture = Drawing(820, 230, LABEL)
    picture.text(
        24, 34, "n-step returns of 256 samples: 2.5 us predicted, 3.1 measured", "title", "start"
    )
    x = 24.0
    for words, what, time, color in PARTS:
        width = SCALE * time
        picture.text(x + width / 2, 66, words)
        picture.text(x + width / 2, 82, what, "small")
        picture.bar(x + 1, 92, width - 2, 30, color)
        picture.text(x + width / 2, 140, f"{time:g} us", "small")
        x += width
    for number, words in enumerate(NOTES):
        picture.text(24, 172 + 20 * number, words, "small", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
