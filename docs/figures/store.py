"""Draw a table's store: columns, extents, slots and the ring of selections.

python docs/figures/store.py > docs/figures/store.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "A store has one region of rows per column. A trajectory is one extent, the same rows in "
    "every column. Slots name extents, and a ring holds the newest selections."
)
COLUMNS = (("observation", "T+1 rows"), ("action", "T rows"), ("reward", "T rows"))
# Of each extent: the first pixel, the width and the color.
EXTENTS = ((0, 150, "blue"), (154, 80, "orange"), (238, 190, "green"), (470, 110, "blue"))
SLOTS = (
    ("slot 0", "committed", "blue"),
    ("slot 1", "evicted, pinned", "orange"),
    ("slot 2", "committed", "green"),
    ("slot 3", "free", "plain"),
    ("slot 4", "committed", "blue"),
)
SELECTIONS = ("batch 41", "batch 42", "batch 43")


def main() -> None:
    picture = Drawing(820, 420, LABEL)
    picture.text(20, 32, "a store: one node's part of a table, in shared memory", "title", "start")
    picture.box(15, 46, 790, 360, "group")
    for number, (slot, state, kind) in enumerate(SLOTS):
        picture.labelled_box(175 + 124 * number, 62, 112, 46, (slot, state), kind)
    picture.text(30, 84, "slots", "text", "start")
    picture.text(30, 101, "id, state, extent", "small", "start")
    for slot, (x, width, _) in zip((0, 1, 2, 4), EXTENTS, strict=True):
        middle = 175 + x + width / 2
        picture.arrow(f"M{231 + 124 * slot} 108L{middle:g} 148")
    for row, (name, rows) in enumerate(COLUMNS):
        y = 154 + 40 * row
        picture.text(30, y + 13, name, "text", "start")
        picture.text(30, y + 28, rows, "small", "start")
        picture.box(175, y, 610, 26)
        for x, width, color in EXTENTS:
            picture.bar(175 + x + 1, y + 3, width, 20, color)
    picture.text(30, 297, "an extent: the same rows in every column", "small", "start")
    picture.text(785, 297, "free rows become contiguous by compaction", "small", "end")
    picture.text(30, 342, "selections", "text", "start")
    picture.text(30, 359, "a ring", "small", "start")
    for number, name in enumerate(SELECTIONS):
        lines = (name, "ids, anchors, masses, extents")
        picture.labelled_box(175 + 206 * number, 322, 198, 46, lines)
    picture.text(
        30, 392, "A selection pins its extents until every rank has copied them.", "small", "start"
    )
    print(picture.svg())


if __name__ == "__main__":
    main()
