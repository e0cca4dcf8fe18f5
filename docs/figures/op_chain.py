"""Draw the ops between a sample's number and its rows in a batch, and their implementations.

python docs/figures/op_chain.py > docs/figures/op_chain.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "The number of a sample becomes a point of the total mass by draw_, the point a trajectory and "
    "an anchor by resolve_, and these the rows of a batch by gather_. Each op has C++ and CUDA "
    "implementations, which are compared bit for bit with a definition in PyTorch."
)
OPS = ("draw_", "resolve_", "gather_")
VALUES = (
    ("sample 7", "of batch 41"),
    ("point 812", "of mass 4,096"),
    ("slot 3, anchor 5", "rows 120 to 160"),
    ("tensors, masks", "of the batch"),
)
FORMS = (
    ("C++", "e.g. csrc/gather/gather_cpu.cpp", "blue"),
    ("CUDA", "e.g. csrc/gather/gather.cu", "green"),
    ("PyTorch", "the definition: ops/reference/", "orange"),
)


def main() -> None:
    picture = Drawing(820, 300, LABEL)
    picture.text(24, 34, "from a sample's number to its rows", "title", "start")
    for number, words in enumerate(VALUES):
        x = 24 + 212 * number
        picture.labelled_box(x, 62, 136, 54, words, "group")
        if number < len(OPS):
            picture.text(x + 174, 80, OPS[number])
            picture.arrow(f"M{x + 140} 89H{x + 208}")
    picture.text(24, 164, "each op, three times", "title", "start")
    for number, (name, place, color) in enumerate(FORMS):
        picture.labelled_box(24 + 262 * number, 182, 248, 54, (name, place), color)
    picture.text(
        24,
        266,
        "C++ and CUDA share the arithmetic of ops/csrc/common/, and equal the definition,",
        "small",
        "start",
    )
    picture.text(24, 284, "bit for bit, for any number of ranks and threads.", "small", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
