"""Draw packs of a group with and without a shared prompt.

python docs/figures/shared_prompt.py > docs/figures/shared_prompt.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "Padded to the longest response, a group of four takes many places without a token. Packed, "
    "it takes one per token. With a shared prompt the prompt is there once."
)
PROMPT = 96  # pixels, one for each token
RESPONSES = (150, 62, 106, 40)
LEFT = 200


def draw_packed(picture: Drawing, y: float, is_shared: bool) -> int:
    """Draw one sequence; return its places."""
    x = LEFT
    for number, response in enumerate(RESPONSES):
        if number == 0 or not is_shared:
            picture.bar(x, y, PROMPT - 2, 22, "blue")
            x += PROMPT
        picture.bar(x, y, response - 2, 22, "green")
        x += response
    return x - LEFT


def main() -> None:
    picture = Drawing(950, 330, LABEL)
    picture.text(20, 32, "a group of four responses to one prompt", "title", "start")
    longest = PROMPT + max(RESPONSES)
    for number, response in enumerate(RESPONSES):
        y = 52 + 26 * number
        picture.bar(LEFT, y, PROMPT - 2, 20, "blue")
        picture.bar(LEFT + PROMPT, y, response - 2, 20, "green")
        if response < max(RESPONSES):
            picture.bar(LEFT + PROMPT + response, y, max(RESPONSES) - response, 20, "gray")
    picture.text(20, 95, "padded", "text", "start")
    picture.text(20, 112, f"{4 * longest} places", "small", "start")
    places = draw_packed(picture, 188, is_shared=False)
    picture.text(20, 197, "packed", "text", "start")
    picture.text(20, 214, f"{places} places", "small", "start")
    places = draw_packed(picture, 244, is_shared=True)
    picture.text(20, 253, 'packed, "prefix": "share"', "text", "start")
    picture.text(20, 270, f"{places} places", "small", "start")
    for x, color, words in (
        (20, "blue", "the prompt's tokens"),
        (200, "green", "a response's tokens"),
        (380, "gray", "padding"),
    ):
        picture.bar(x, 298, 14, 14, color)
        picture.text(x + 22, 310, words, "small", "start")
    picture.text(930, 310, "Each response attends to the prompt and to itself.", "small", "end")
    print(picture.svg())


if __name__ == "__main__":
    main()
