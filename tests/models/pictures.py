"Pictures of noise, and data sets of them."

import datasets
import numpy as np
from datasets import Dataset, Features
from PIL import Image


def noise(*size, random_state=0, channels=3):
    "A picture of random pixels."
    rng = np.random.default_rng(random_state)
    return Image.fromarray(rng.integers(0, 256, (*size, channels), dtype=np.uint8).squeeze())


def pictures(images, **columns):
    "A data set of images and columns of strings."
    strings = {name: datasets.Value("string") for name in columns}
    features = Features(image=datasets.Image(), **strings)
    return Dataset.from_dict(dict(image=images, **columns), features=features)
