"""The ImageNet subset and a user's own class folders."""

from __future__ import annotations

import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from calfat_plugin.datasets import Augmentation
from calfat_plugin.datasets.batches import batches
from calfat_plugin.datasets.folders import _common_shape, load_image_folder, load_imagenet_subset
from calfat_plugin.errors import DataError, OptionError
from tests.inputs import on_disk

CLASSES = ["cat", "dog", "emu"]


def test_images_of_the_size_asked_for_arrive_unchanged(tmp_path):
    wrote = on_disk.write_class_folders(tmp_path, CLASSES, n_train=9, n_test=6)
    data = load_image_folder(tmp_path, size=16)
    assert data.class_names == tuple(CLASSES)
    assert data.num_classes == 3
    assert not data.augment
    assert data.train.x.dtype == torch.uint8
    assert np.array_equal(data.train.x.numpy(), wrote.x_train)
    assert np.array_equal(data.train.y.numpy(), wrote.y_train)
    assert np.array_equal(data.test.x.numpy(), wrote.x_test)
    assert np.array_equal(data.test.y.numpy(), wrote.y_test)


@pytest.mark.parametrize(("width", "height"), [(40, 20), (20, 40)])
def test_the_shorter_side_is_resized_and_the_middle_kept(width, height, tmp_path):
    """White in the middle of the longer side, black at both ends: only white stays."""
    picture = np.zeros((40, 20, 3), dtype=np.uint8)
    picture[10:30] = 255
    if width > height:
        picture = picture.transpose(1, 0, 2)
    for split in ("train", "test"):
        (tmp_path / split / "only").mkdir(parents=True)
        Image.fromarray(picture).save(tmp_path / split / "only" / "one.png")
    x = load_image_folder(tmp_path, size=20).train.x
    assert x.shape == (1, 3, 20, 20)
    assert x.min() == 255
    assert load_image_folder(tmp_path, size=10).train.x.shape == (1, 3, 10, 10)


def test_small_images_grow_and_grey_is_one_channel(tmp_path):
    on_disk.write_class_folders(tmp_path, CLASSES, size=5)
    data = load_image_folder(tmp_path, size=8, channels=1, crop_padding=2, flip=True)
    assert data.train.x.shape[1:] == (1, 8, 8)
    assert data.augment == Augmentation(crop_padding=2, flip=True)


def write(root: Path, name: str, image: Image.Image, splits: tuple[str, ...] = ("train", "test")) -> None:
    for split in splits:
        path = root / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_images_that_are_all_alike_keep_their_size_and_channels(tmp_path):
    grey, colour = pixels(8, 8), pixels(9, 12, 3)
    for name in ("cat/a.png", "cat/b.png", "dog/a.png"):
        write(tmp_path / "grey", name, Image.fromarray(grey))
        write(tmp_path / "wide", name, Image.fromarray(colour))
    data = load_image_folder(tmp_path / "grey")
    assert (data.in_channels, data.image_size, data.train.x.dtype) == (1, (8, 8), torch.uint8)
    assert np.array_equal(data.train.x.numpy(), np.stack([grey[None]] * 3))
    assert np.array_equal(data.test.x.numpy(), np.stack([grey[None]] * 3))
    wide = load_image_folder(tmp_path / "wide", crop_padding=2, flip=True)
    assert np.array_equal(wide.train.x[0].numpy(), colour.transpose(2, 0, 1))
    (batch,) = batches(wide.train, 3, "cpu", generator=torch.Generator().manual_seed(0), augment=wide.augment)
    assert batch.x.shape == (3, 3, 9, 12)
    for shape, options in {(3, 8, 8): {"channels": 3}, (1, 16, 16): {"size": 16}}.items():
        assert load_image_folder(tmp_path / "grey", **options).train.x.shape[1:] == shape


def test_images_of_different_sizes_and_channels_need_what_all_are_made(tmp_path):
    for number in range(3):
        write(tmp_path, f"cat/{number}.png", Image.fromarray(pixels(8, 8)))
    write(tmp_path, "dog/a.png", Image.fromarray(pixels(16, 20)))
    write(tmp_path, "dog/b.png", Image.fromarray(pixels(8, 8, 3)), ("test",))
    cat, dog, coloured = tmp_path / "train/cat/0.png", tmp_path / "train/dog/a.png", tmp_path / "test/dog/b.png"
    for given, shown in (
        ({}, f"{cat} has (1, 8, 8), {dog} has (1, 16, 20), {coloured} has (3, 8, 8)"),
        ({"channels": 1}, f"{cat} has (1, 8, 8), {dog} has (1, 16, 20)"),
        ({"size": 9}, f"{cat} has (1, 9, 9), {coloured} has (3, 9, 9)"),
    ):
        with pytest.raises(DataError, match=re.escape(f": images differ in (channels, height, width): {shown}. ")):
            load_image_folder(tmp_path, **given)
    assert load_image_folder(tmp_path, size=9, channels=1).test.x.shape == (5, 1, 9, 9)


def test_hidden_files_and_folders_do_not_count(tmp_path):
    write(tmp_path, "cat/a.png", Image.fromarray(pixels(8, 8)))
    write(tmp_path, "dog/a.png", Image.fromarray(pixels(9, 9)), ("train",))
    for hidden in (".DS_Store", "Thumbs.db"):
        (tmp_path / "train" / "cat" / hidden).write_text("of a file manager")
    (tmp_path / "train" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    data = load_image_folder(tmp_path, classes="cat")
    assert (data.image_size, len(data.train)) == ((8, 8), 1)
    assert load_image_folder(tmp_path, size=8).test.y.tolist() == [0]  # a class without test images
    party = {"only": "train", "classes": "cat,dog", "size": 8, "channels": 1}
    assert load_image_folder(tmp_path, **party).image_size == (8, 8)


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3)])
def test_the_channels_of_each_kind_of_image(mode, channels, tmp_path):
    """Transparency is dropped, and a palette has colours."""
    image = Image.fromarray(pixels(8, 8, 3)).convert(mode)
    if mode.endswith("A"):
        image.putalpha(7)
    write(tmp_path, "cat/a.png", image)
    data = load_image_folder(tmp_path)
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(8, 8, channels).transpose(2, 0, 1)
    assert np.array_equal(data.train.x[0].numpy(), expected)


def test_sizes_are_read_from_headers_alone(tmp_path, monkeypatch):
    write(tmp_path, "cat/a.png", Image.fromarray(pixels(8, 8)))
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert _common_shape("image_folder", [tmp_path / "train/cat/a.png"] * 5000, None, None) == (1, 8, 8)


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (lambda root: shutil.rmtree(root / "train"), {}, "data set image_folder: {}/train is missing. "),
        (lambda root: [*map(shutil.rmtree, (root / "train").iterdir())], {}, "{}/train holds no folders. "),
        (lambda root: (root / "train" / "fox").mkdir(), {}, "{}/train/fox holds no images (files ending in .bmp, "),
        (lambda root: (root / "test" / "fox").mkdir(), {}, "{}/test/fox is a class without training images; "),
        # What would be left out without a word.
        (lambda root: (root / "train/cat/b.gif").touch(), {}, "{}/train/cat/b.gif does not end in .bmp, .jpeg, "),
        (lambda root: (root / "test/dog/b").mkdir(), {}, "{}/test/dog/b is a folder; expected nothing but images in "),
        (lambda root: (root / "train/b.png").touch(), {}, "{}/train/b.png is in no class folder. Expected one folder "),
        (None, {"size": 10**7}, "{}/train has 20 images, which at 10000000x10000000 pixels take 6,000,000 GB of "),
        (None, {"classes": "cat,cat"}, "classes: 'cat' is listed twice; a folder is one class."),
        (None, {"crop_padding": 16}, "crop_padding: got 16, expected less than size, 16; crops would be black."),
        # A party alone does not choose the shape of its images.
        *((None, {"only": "train", "classes": "cat,dog,emu", **of}, ": silo, write calfat.dataset.classes, size and ")
          for of in ({}, {"size": 8}, {"channels": 1})),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused(change, options, text, tmp_path):
    on_disk.write_class_folders(tmp_path, CLASSES)
    if change:
        change(tmp_path)
    with pytest.raises((DataError, OptionError), match=re.escape(text.format(tmp_path))):
        load_image_folder(tmp_path, **options)


@pytest.mark.parametrize(
    ("write_all", "load", "damaged"),
    [
        (lambda root: on_disk.write_class_folders(root, CLASSES), load_image_folder, "test/dog"),
        (on_disk.write_imagenet_subset, load_imagenet_subset, "val/n03888257"),
    ],
)
def test_a_damaged_image_is_refused_by_name(write_all, load, damaged, tmp_path):
    write_all(tmp_path)
    path = next((tmp_path / damaged).iterdir())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=f"^data set [a-z_]+: {re.escape(str(path))} cannot be read "):
        load(tmp_path)


def test_sixteen_bits_a_channel_are_refused_rather_than_cut_off(tmp_path):
    """Pillow opens a file with 16 bits of each colour as one of 8 bits, and does not write one."""
    rows = b"".join(b"\0" + b"\x0f\xa0" * 3 * 16 for _ in range(16))
    header = struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    coloured = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    path = tmp_path / "train" / "cat" / "scan.png"
    on_disk.write_class_folders(tmp_path, CLASSES)
    Image.fromarray(np.full((16, 16), 4000, dtype=np.uint16)).save(path)
    start = re.escape(f"{path} has more than 8 bits a channel")
    with pytest.raises(DataError, match=f"^{start} .mode I;16"):
        load_image_folder(tmp_path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + coloured)
    with pytest.raises(DataError, match=f"^{start} .mode RGB"):
        load_image_folder(tmp_path)


@pytest.mark.parametrize("magic", ["P2", "P3", "P5", "P6"])
def test_a_portable_pixmap_of_more_than_8_bits_is_refused(magic, tmp_path):
    """Pillow scales the values of colours to 8 bits as it opens the file; those of up to 255 it takes as they are."""
    channels = 3 if magic in ("P3", "P6") else 1
    path = tmp_path / "train" / "cat" / "scan.ppm"
    write(tmp_path, "cat/a.png", Image.fromarray(pixels(8, 8, 3)))
    values = np.arange(8 * 8 * channels)
    for maximum in (255, 256, 1023, 65535):
        width = ">u1" if maximum <= 255 else ">u2"
        body = " ".join(map(str, values)).encode() if magic in ("P2", "P3") else values.astype(width).tobytes()
        path.write_bytes(f"{magic}\n8 8\n{maximum}\n".encode() + body)
        if maximum == 255:
            read = load_image_folder(tmp_path, channels=3).train.x[1]
            expected = np.broadcast_to(values.reshape(8, 8, channels), (8, 8, 3)).transpose(2, 0, 1)
            assert np.array_equal(read.numpy(), expected)
            continue
        mode = f"RGB, values up to {maximum}" if channels == 3 else "I"
        with pytest.raises(DataError, match=re.escape(f"{path} has more than 8 bits a channel (mode {mode}")):
            load_image_folder(tmp_path, channels=3)


ORIENTATION = 0x0112  # the tag of EXIF
#: What a camera with this orientation stored, from the picture as it is seen.
AS_STORED = {
    1: lambda seen: seen,
    2: lambda seen: seen[:, ::-1],
    3: lambda seen: seen[::-1, ::-1],
    4: lambda seen: seen[::-1],
    5: lambda seen: seen.transpose(1, 0, 2),
    6: lambda seen: np.rot90(seen, 1),
    7: lambda seen: np.rot90(seen, 2).transpose(1, 0, 2),
    8: lambda seen: np.rot90(seen, -1),
}


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", AS_STORED)
def test_images_are_read_upright(orientation, ending, tmp_path):
    """As whoever labelled them saw them, with their own size and with one that is asked for."""
    seen = pixels(8, 12, 3)
    stored = Image.fromarray(np.ascontiguousarray(AS_STORED[orientation](seen)))
    exif = stored.getexif()
    exif[ORIENTATION] = orientation
    for split in ("train", "test"):
        path = tmp_path / split / "cat" / f"a.{ending}"
        path.parent.mkdir(parents=True)
        stored.save(path, exif=exif, **({"lossless": True} if ending == "webp" else {}))
    read = load_image_folder(tmp_path).train.x
    assert read.shape == (1, 3, 8, 12)
    assert np.array_equal(read[0].numpy(), seen.transpose(2, 0, 1))
    assert np.array_equal(load_image_folder(tmp_path, size=8).train.x[0].numpy(), seen[:, 2:10].transpose(2, 0, 1))


def test_a_photograph_is_read_upright(tmp_path):
    seen = np.zeros((8, 16, 3), dtype=np.uint8)
    seen[:, 8:] = 255
    stored = Image.fromarray(np.ascontiguousarray(AS_STORED[8](seen)))
    exif = stored.getexif()
    exif[ORIENTATION] = 8
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        stored.save(tmp_path / split / "cat" / "a.jpg", exif=exif, quality=100)
    (read,) = load_image_folder(tmp_path).test.x
    assert read.shape == (3, 8, 16)
    assert read[:, :, :8].max() < 10
    assert read[:, :, 8:].min() > 245


@pytest.mark.parametrize(("ending", "kind"), [("tif", "TIFF"), ("png", "PNG"), ("webp", "WEBP"), ("png", "GIF")])
def test_pages_and_frames_are_refused_rather_than_left_out(ending, kind, tmp_path):
    pages = [Image.fromarray(pixels(8, 8, 3) // divisor) for divisor in (1, 2, 3)]
    write(tmp_path, "cat/a.png", pages[0])
    path = tmp_path / "train" / "cat" / f"several.{ending}"
    pages[0].save(path, format=kind, save_all=True, append_images=pages[1:])
    for options in ({}, {"size": 8, "channels": 3}):
        with pytest.raises(DataError, match=f"^{re.escape(str(path))} holds 3 images .pages of a {kind}, "):
            load_image_folder(tmp_path, **options)
    pages[0].save(path, format=kind)
    assert len(load_image_folder(tmp_path, channels=3).train) == 2


def test_of_a_photograph_with_a_preview_the_photograph_is_read(tmp_path):
    photograph, preview = (Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (200, 20))
    write(tmp_path, "cat/a.png", photograph)
    photograph.save(tmp_path / "train" / "cat" / "b.jpg", format="MPO", save_all=True, append_images=[preview])
    assert load_image_folder(tmp_path).train.x.flatten(1).tolist() == [[200] * 192] * 2


def test_a_format_that_may_lose_bits_is_refused_under_any_ending(tmp_path):
    write(tmp_path, "cat/a.png", Image.fromarray(pixels(8, 8, 3)))
    path = tmp_path / "test" / "cat" / "b.jpg"
    Image.fromarray(pixels(8, 8, 3)).save(path, format="JPEG2000")
    with pytest.raises(DataError, match=f"^data set image_folder: {re.escape(str(path))} cannot be read "):
        load_image_folder(tmp_path)


@pytest.mark.parametrize("below", ["", "imagenet_subset"])
def test_the_imagenet_subset_is_read_at_64_with_other_classes_beside(below, tmp_path):
    on_disk.write_imagenet_subset(tmp_path / below)
    (tmp_path / below / "train" / "n00000001").mkdir()
    data = load_imagenet_subset(tmp_path)
    assert data.name == "imagenet_subset"
    assert data.train.x.shape == (24, 3, 64, 64)
    assert data.test.y.tolist() == list(range(12))
    assert data.class_names[:2] == ("tench", "golden retriever")
    assert data.augment == Augmentation(crop_padding=8, flip=True)


def test_a_missing_imagenet_says_where_to_get_it(tmp_path):
    on_disk.write_imagenet_subset(tmp_path)
    lost = tmp_path / "val" / "n03888257"
    shutil.rmtree(lost)
    with pytest.raises(DataError, match=re.escape(f"there is no folder {lost} (looked in {tmp_path} and ")):
        load_imagenet_subset(tmp_path)
