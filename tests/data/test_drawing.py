"Pictures of a benchmark: the same in every run, two colours, and alike where they should be."

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from harmomoe.data.drawing import (
    black,
    colour,
    dhash,
    encoded,
    generator,
    ink_of,
    luminance,
    placed,
    printed,
    sheet,
)


@pytest.fixture(scope="module")
def mask():
    "An L of 60 x 80 pixels."
    found = Image.new("L", (60, 80))
    pen = ImageDraw.Draw(found)
    pen.rectangle((0, 0, 15, 79), fill=255)
    pen.rectangle((0, 64, 59, 79), fill=255)
    return found


def test_a_generator_is_for_one_purpose():
    draws = [
        generator(*key).random() for key in ((0, "a", 1), (0, "a", 1), (0, "a", 2), (1, "a", 1))
    ]
    assert draws[0] == draws[1] and len(set(draws)) == 3


@pytest.mark.parametrize("low, high", [(0, 0.3), (0.6, 1)])
def test_colours_have_the_luminance_asked_for(low, high):
    found = [luminance(colour(generator(0, i), low, high)) for i in range(200)]
    assert low - 1e-6 <= min(found) and max(found) <= high + 1e-6
    assert max(found) - min(found) > (high - low) / 2


@pytest.mark.parametrize("scale", [(0.3, 0.4), (0.9, 0.95)])
def test_a_placed_drawing_is_whole_and_of_its_size(mask, scale):
    for i in range(20):
        found = placed(black(mask), generator(0, i), scale, turn=0)
        assert found.shape == (48, 48, 4)
        rows, columns = np.nonzero(found[..., 3] > 60)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert scale[0] * 48 - 2 <= height <= scale[1] * 48 + 1
        assert abs(width / height - 60 / 80) < 0.1, "cut off or stretched"


def test_a_print_has_two_colours_and_few_between_and_repeats(mask):
    for i in range(20):
        image = printed(mask, generator(0, i))
        colours = sorted((luminance(of) for _, of in image.getcolors()), reverse=True)
        assert image.size == (48, 48) and 2 <= len(colours) <= 8
        assert colours[0] - colours[-1] > 0.15, "ink that cannot be seen"
        assert image.tobytes() == printed(mask, generator(0, i)).tobytes()


def test_ink_is_found_whatever_its_colour(mask):
    ink = [ink_of(printed(mask, generator(0, i), (0.8, 0.8), turn=0)) for i in range(20)]
    for of in ink:
        assert of.min() == 0 and of.max() == 1
        rows, columns = np.nonzero(of > 0.5)
        # the upper right of an L is empty
        inner = of[rows.min() + 2 : rows.max() - 9, columns.min() + 10 : columns.max()]
        assert inner.max() < 0.5 < of[rows.min() + 3 : rows.max(), columns.min() + 3].min()


def test_lossless_encoding_keeps_every_pixel_and_hashes_tell_pictures_apart(mask):
    image = printed(mask, generator(0))
    code = encoded(image, lossless=True)
    assert Image.open(io.BytesIO(code)).convert("RGB").tobytes() == image.tobytes()
    assert dhash(image) == dhash(image.resize((96, 96)).resize((48, 48), Image.BOX))
    assert dhash(image) != dhash(image.rotate(180))


def test_a_sheet_has_all_pictures_and_is_small(mask):
    images = [printed(mask, generator(0, i)) for i in range(40)]
    code = sheet(images, ["name"] * 40, columns=8)
    page = Image.open(io.BytesIO(code))
    assert len(code) < 60_000 and page.size == (8 * 56, 5 * 66)
