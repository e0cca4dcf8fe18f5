"""Draw how rows move between two nodes for one global batch.

python docs/figures/node_rows.py > docs/figures/node_rows.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "Both nodes select the same samples. Each node sends the rows that only it holds, once to "
    "each node that needs them, and every rank gathers from its own node."
)
HELD = (("A", "B", "C"), ("D", "E", "F"))
CAME = (("D", "F"), ("B",))
STEPS = (
    "1  both nodes select the same samples: masses are summed over all stores, as integers",
    "2  each node sends the rows that the other lacks, each once, and only what its ranks read",
    "3  every rank gathers its part from its own node: from the store, or from the rows that came",
)


def draw_node(picture: Drawing, x: float, node: int) -> None:
    """Draw a node with the trajectories that it holds, those that came, and its ranks."""
    picture.box(x, 50, 350, 222, "group")
    picture.text(x + 175, 74, f"node {node}", "title")
    picture.box(x + 20, 88, 150, 76, "blue")
    picture.text(x + 95, 107, "its store", "small")
    for number, letter in enumerate(HELD[node]):
        picture.labelled_box(x + 32 + 44 * number, 118, 38, 34, (letter,))
    picture.box(x + 185, 88, 145, 76, "orange")
    picture.text(x + 257, 107, "rows of the other node", "small")
    for number, letter in enumerate(CAME[node]):
        picture.labelled_box(x + 197 + 44 * number, 118, 38, 34, (letter,))
    for number in range(2):
        left = x + 20 + 165 * number
        picture.labelled_box(
            left, 206, 145, 50, (f"rank {2 * node + number}", "gathers its samples"), "green"
        )
        picture.arrow(f"M{x + 95} 164L{left + 62} 202")
        picture.arrow(f"M{x + 257} 164L{left + 84} 202")


def main() -> None:
    picture = Drawing(820, 390, LABEL)
    picture.text(410, 30, "one global batch with the samples A, B, D and F", "title")
    draw_node(picture, 20, 0)
    draw_node(picture, 450, 1)
    picture.arrow("M370 126H446")
    picture.text(408, 118, "B", "small")
    picture.arrow("M450 146H374")
    picture.text(408, 164, "D, F", "small")
    for number, words in enumerate(STEPS):
        picture.text(24, 306 + 26 * number, words, "text", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
