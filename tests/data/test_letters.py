"As many letters as are asked for, the same for everybody, in typefaces of which none is shared."

import numpy as np
import pytest
from PIL import Image

from harmomoe.data.domains import fingerprint
from harmomoe.data.drawing import generator
from harmomoe.data.letters import draw_letters, letter, typefaces


def test_letters_are_readable_as_pictures_and_balanced():
    domain = draw_letters(78, 26, 26)
    assert np.bincount(domain.train["label"]).tolist() == [3] * 26
    image = domain.train[0]["image"]
    assert (image.size, image.mode) == ((48, 48), "RGB")
    pixels = np.stack([np.asarray(row["image"], float) for row in domain.train])
    assert pixels.std((1, 2)).max(1).min() > 10  # there is something on each


def test_more_letters_begin_with_fewer_and_another_state_draws_others():
    few, more, other = (
        draw_letters(n, 26, 26, random_state=s).train for n, s in ((26, 0), (52, 0), (26, 1))
    )
    assert fingerprint(few) == fingerprint(more.select(range(26))) != fingerprint(other)


def test_other_letters_are_another_domain_of_the_same_kind():
    upper, lower = draw_letters(52, 26, 26), draw_letters(52, 26, 26, letters="abcdefg")
    assert lower.classes == [f"letter {one}" for one in "abcdefg"]
    assert np.bincount(lower.train["label"]).tolist() == [8, 8, 8, 7, 7, 7, 7]
    assert fingerprint(upper.train) != fingerprint(lower.train)
    with pytest.raises(ValueError, match="test has 6 images, but there are 7 letters"):
        draw_letters(52, 26, 6, letters="abcdefg")


def test_ink_and_paper_differ():
    mask = Image.new("L", (40, 60), 255)
    for i in range(20):
        pixels = np.asarray(letter(mask, generator(0, i)).convert("L"), float)
        assert abs(pixels[24, 24] - pixels[0, 0]) > 25


def test_folder_without_typefaces_is_refused(tmp_path):
    assert len({path.stem for path in typefaces()}) == len(typefaces()) > 10
    with pytest.raises(ValueError, match="0 typefaces"):
        draw_letters(100, folder=tmp_path)
    with pytest.raises(ValueError, match="26 letters"):
        draw_letters(26, 5)
