"""Draw the folders of a table during a save: what each holds after each step.

python docs/figures/save_folders.py > docs/figures/save_folders.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "A save k is written into t.partial beside the save k-1 in t. One exchange swaps both names, "
    "a rename turns t.partial into t.old, and position.json then names save k. In every column one "
    "folder holds the save that the position names, whole."
)
STEPS = (
    ("before", ""),
    ("1  begin", "room is made"),
    ("2  write", "new files, fsync"),
    ("3  publish", "exchange"),
    ("", "rename"),
    ("4  position", "atomic"),
)
# What a folder holds after each step: a save, an incomplete one, or nothing.
CONTENTS = (
    ("t", ("k-1", "k-1", "k-1", "k", "k", "k")),
    ("t.partial", ("", "", "k, growing", "k-1", "", "")),
    ("t.old", ("k-2", "", "", "", "k-1", "k-1")),
    ("position.json", ("k-1", "k-1", "k-1", "k-1", "k-1", "k")),
)
KINDS = {"k": "green", "k-1": "blue", "k, growing": "orange", "k-2": "plain"}
LEFT = 140
WIDTH = 110


def main() -> None:
    picture = Drawing(820, 340, LABEL)
    picture.text(24, 32, "the folders of table t during save k", "title", "start")
    for number, (name, what) in enumerate(STEPS):
        middle = LEFT + WIDTH * number + WIDTH / 2
        picture.text(middle, 64, name)
        picture.text(middle, 81, what, "small")
    for row, (folder, contents) in enumerate(CONTENTS):
        y = 96 + 54 * row
        picture.text(24, y + 25, folder, "text", "start")
        for number, content in enumerate(contents):
            x = LEFT + WIDTH * number + 4
            if content:
                picture.labelled_box(x, y, WIDTH - 8, 40, (content,), KINDS[content])
    picture.text(
        24,
        326,
        "Blue: the save that a load takes until position.json, or the model's file, names k.",
        "small",
        "start",
    )
    print(picture.svg())


if __name__ == "__main__":
    main()
