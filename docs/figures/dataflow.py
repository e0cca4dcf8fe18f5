"""Draw the way of the data: from writers into stores, through selections, to ranks and back.

python docs/figures/dataflow.py > docs/figures/dataflow.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "Writers commit trajectories into one store per node. One process per node selects each "
    "global batch. Every rank gathers its own part of it. Priorities flow back."
)
WRITERS = (
    ("data sets", "LeRobot, Minari, D4RL, ..."),
    ("actors, simulators", "on this node, or over TLS"),
    ("rollout workers", "groups of responses"),
)
RANKS = (
    ("rank 0", "gathers its part in place"),
    ("rank 1", "CPU copy, or GPU kernel"),
    ("TP, PP and SP ranks", "same samples, own fields"),
)
COLUMNS = ("observation", "action", "reward", "log-probs")
LENGTHS = (44, 26, 18)  # of three trajectories in the store, in pixels
TREE = ((610, 116), (570, 142), (650, 142), (550, 168), (590, 168), (630, 168), (670, 168))


def draw_store(picture: Drawing) -> None:
    """Draw columns with the rows of three trajectories, one after another."""
    picture.box(260, 72, 210, 182, "blue")
    picture.text(365, 97, "tables in shared memory")
    for row, column in enumerate(COLUMNS):
        y = 112 + 25 * row
        picture.text(275, y + 11, column, "small", "start")
        x = 357.0
        for length in LENGTHS:
            picture.bar(x, y, length, 13, "blue")
            x += length + 4
    picture.text(365, 229, "whole trajectories, no padding", "small")
    picture.text(365, 245, "each committed, or invisible", "small")


def draw_selection(picture: Drawing) -> None:
    """Draw a tree of masses."""
    picture.box(520, 72, 180, 182)
    picture.text(610, 97, "once per global batch")
    for child in range(1, len(TREE)):
        (x, y), (to_x, to_y) = TREE[(child - 1) // 2], TREE[child]
        picture.line(x, y, to_x, to_y, "green")
    for x, y in TREE:
        picture.dot(x, y, 5, "green")
    for row, words in enumerate(
        ("integer masses, exact over", "all nodes; counter-based", "random numbers")
    ):
        picture.text(610, 200 + 16 * row, words, "small")


def main() -> None:
    picture = Drawing(980, 400, LABEL)
    for x, words in ((105, "write"), (365, "store"), (610, "select"), (845, "gather and train")):
        picture.text(x, 34, words, "title")
    for row, lines in enumerate(WRITERS):
        picture.labelled_box(25, 72 + 65 * row, 160, 52, lines)
    picture.box(235, 54, 720, 218, "group")
    picture.text(943, 267, "one node", "small", "end")
    draw_store(picture)
    draw_selection(picture)
    for row, lines in enumerate(RANKS):
        y = 72 + 65 * row
        picture.labelled_box(750, y, 190, 52, lines, "green")
        picture.arrow(f"M185 {y + 26}H256")
        picture.arrow("M700 163H746" if row == 1 else f"M722 163V{y + 26}H746")
    picture.arrow("M470 163H516")
    picture.back_arrow("M845 254V290H610V258")
    picture.text(728, 306, "priorities, applied in one order before the next selection", "small")
    words = ("the other nodes: the same batch, each with its own trajectories",)
    note = "a node fetches the rows that it lacks, each once"
    picture.labelled_box(235, 322, 720, 56, (*words, note), "group")
    picture.arrow("M375 254V318")
    picture.arrow("M355 322V258")
    print(picture.svg())


if __name__ == "__main__":
    main()
