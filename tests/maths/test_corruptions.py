"""Corruptions of images: what each does, by hand on small ones, and what all keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from calfat_plugin.maths.corruptions import CORRUPTIONS, severities


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(kind: str, x: Tensor, seed: int = 0) -> list[Tensor]:
    return list(severities(kind, x, seeded(seed)))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 4, 6)])
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_all_keep_shape_range_and_the_images_themselves(kind, shape):
    x = torch.rand(6, *shape, generator=seeded())
    before = x.clone()
    versions = made(kind, x)
    assert len(versions) == 5
    for version in versions:
        assert (version.shape, version.dtype) == (x.shape, x.dtype)
        assert version.isfinite().all()
        assert 0 <= version.min() <= version.max() <= 1
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_higher_severity_changes_more(kind):
    x = torch.rand(6, 3, 32, 32, generator=seeded()) * 0.2 + 0.4
    changes = [float((version - x).abs().mean()) for version in made(kind, x)]
    assert changes == sorted(changes)
    assert 0 < changes[0] < changes[-1]


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_the_same_seed_draws_the_same_and_another_one_does_not(kind):
    x = torch.rand(8, 1, 8, 8, generator=seeded())
    first, again, other = made(kind, x), made(kind, x), made(kind, x, seed=1)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, other)) == (kind in ("blur", "contrast"))  # these draw nothing


def test_noise_has_its_strength():
    x = torch.full((4, 3, 32, 32), 0.5)
    for version, strength in zip(made("noise", x), CORRUPTIONS["noise"].strengths, strict=True):
        assert (version - x).std().item() == pytest.approx(strength, rel=0.03)


def test_brightness_goes_up_for_some_and_down_for_others():
    last = made("brightness", torch.full((20, 1, 2, 2), 0.5))[-1]
    assert sorted({round(value, 6) for value in last.flatten().tolist()}) == [0.2, 0.8]
    assert last.flatten(1).std(dim=1).max() == 0  # a whole image alike


def test_contrast_shrinks_towards_the_mean_of_each_channel():
    x = torch.tensor([0.2, 0.6, 0.0, 1.0]).view(1, 2, 1, 2)
    first = made("contrast", x)[0]
    assert first.flatten().tolist() == pytest.approx([0.25, 0.55, 0.125, 0.875])


def test_blur_keeps_what_is_flat_and_spreads_a_point():
    point = torch.zeros(1, 1, 9, 9)
    point[0, 0, 4, 4] = 1
    blurred = made("blur", point)[-1]
    assert torch.allclose(made("blur", torch.full((1, 1, 9, 9), 0.3))[-1], torch.tensor(0.3))
    assert blurred[0, 0, 4, 5] / blurred[0, 0, 4, 4] == pytest.approx(torch.tensor(-0.5).exp().item(), rel=1e-4)
    assert torch.allclose(blurred, blurred.transpose(2, 3))


def test_rotation_turns_to_either_side():
    bar = torch.zeros(12, 1, 33, 33)
    bar[:, :, :, 16] = 1  # upright through the centre
    last = made("rotation", bar)[-1]
    # 30 degrees: the bar's upper end is 16 tan 30 = 9 pixels beside the centre
    ends = {int(image[0, 2].argmax()) for image in last}
    assert ends == {16 - 8, 16 + 8}


def test_translation_goes_in_each_of_four_directions_by_a_share_of_the_side():
    point = torch.zeros(40, 1, 20, 20)
    point[:, :, 10, 10] = 1
    last = made("translation", point)[-1]  # a tenth: two pixels
    places = {divmod(int(image.flatten().argmax()), 20) for image in last}
    assert places == {(8, 10), (12, 10), (10, 8), (10, 12)}
    assert torch.allclose(last.flatten(1).sum(dim=1), torch.ones(40), atol=1e-4)


def test_occlusion_is_a_grey_square_somewhere_in_the_image():
    x = torch.zeros(50, 2, 8, 16)
    for version, side in zip(made("occlusion", x), (1, 2, 2, 2, 3), strict=True):
        covered = version == 0.5
        assert torch.equal(covered[:, 0], covered[:, 1])
        assert (covered | (version == 0)).all()
        assert covered[:, 0].flatten(1).sum(dim=1).tolist() == [side * side] * 50
        assert (covered[:, 0].any(dim=2).sum(dim=1) == side).all()
    anywhere = (made("occlusion", x)[0] == 0.5)[:, 0].any(dim=0)
    assert anywhere[:, :4].any()
    assert anywhere[:, 12:].any()
