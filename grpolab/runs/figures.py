"""How a figure is written to disk: a PNG at double resolution in few colours."""

from __future__ import annotations

from io import BytesIO

DPI = 100  # at which a figure has its nominal size in pixels


def png(figure) -> bytes:
    """A matplotlib figure at twice its size, in 24 colours."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=2 * DPI, bbox_inches="tight", facecolor="white")
    return fewer_colours(drawn.getvalue())


def fewer_colours(image: bytes) -> bytes:
    """A PNG in 24 colours; as it was where that is smaller."""
    from PIL import Image  # matplotlib brings it; a run without figures does not load it

    small = BytesIO()
    Image.open(BytesIO(image)).convert("RGB").quantize(24, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return min(image, small.getvalue(), key=len)
