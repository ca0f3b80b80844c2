"""Image decoding against plain code: simplejpeg's full decode, numpy's slices, OpenCV's resize, loops."""

from __future__ import annotations

import gc
import math
import pickle
import struct
import sys
import weakref

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, strategies as st

from dataflow.decode import image as images
from dataflow.decode.crop import (
    DRAW_FLIP,
    DRAW_LEFT,
    DRAW_TOP,
    center_boxes,
    random_resized_crop_boxes,
)
from dataflow.decode.image import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Image,
    MissingImageSupportError,
    decode_image,
    decode_images,
)
from dataflow.decode.values import DRAWS
from sharding.errors import DataflowError, SampleError

cv2 = pytest.importorskip("cv2")
simplejpeg = pytest.importorskip("simplejpeg")


def picture(height=300, width=400, seed=0):
    """A smooth picture with some noise, [h, w, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([y * 255 / height, x * 255 / width, 128 + 100 * np.sin((x + y) / 23)], -1)
    return np.clip(smooth + np.random.default_rng(seed).normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)


def jpeg(pixels, **options):
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), **options)


def coded(pixels, suffix, *options):
    return cv2.imencode(suffix, pixels[..., ::-1] if pixels.ndim == 3 else pixels, list(options))[1].tobytes()


def arrays(encoded):
    return [np.frombuffer(data, np.uint8) for data in encoded]


def decoded(spec, encoded, draws=None):
    out = np.full((len(encoded), *spec.shape), 77, spec.dtype)
    failures = decode_images(spec, arrays(encoded), out, draws)
    return out, failures


def most_apart(levels, others):
    return int(np.abs(levels.astype(int) - others).max())


def size_of(data):
    from dataflow.decode.jpeg import image_size

    return image_size(np.frombuffer(data, np.uint8))


def random_draws(n, seed=1):
    return np.random.default_rng(seed).random((n, DRAWS))


def oracle(data, box, size, *, flip=False, dct="exact", interpolation=cv2.INTER_LINEAR):
    top, left, height, width = box
    pixels = simplejpeg.decode_jpeg(data, fastdct=dct == "fast")[top : top + height, left : left + width]
    pixels = cv2.resize(np.ascontiguousarray(pixels), (size[1], size[0]), interpolation=interpolation)
    return np.ascontiguousarray(pixels[:, ::-1] if flip else pixels)


def crop_by_torchvision(width, height, draws, scale, ratio):
    """torchvision's RandomResizedCrop.get_params, with its random numbers given."""
    for attempt in range(10):
        area = width * height * (scale[0] + draws[2 * attempt] * (scale[1] - scale[0]))
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + draws[2 * attempt + 1] * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[DRAW_TOP] * (height - h + 1)), int(draws[DRAW_LEFT] * (width - w + 1)), h, w
    if width / height < min(ratio):
        w, h = width, round(width / min(ratio))
    elif width / height > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


sides = st.integers(1, 5000)


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=40), st.integers(0, 2**32))
def test_crops_are_torchvisions_for_the_same_draws(sizes, seed):
    widths, heights = np.array(sizes).T
    draws = random_draws(len(sizes), seed)
    boxes = random_resized_crop_boxes(widths, heights, draws)
    for (width, height), row, box in zip(sizes, draws, boxes, strict=True):
        assert tuple(box) == crop_by_torchvision(width, height, row, (0.08, 1.0), (3 / 4, 4 / 3))


def test_crops_that_never_fit_fall_back_to_the_centre():
    draws = random_draws(3)
    widths, heights = np.array([100, 10, 64]), np.array([10, 100, 64])
    boxes = random_resized_crop_boxes(widths, heights, draws, scale=(1.0, 1.0), ratio=(3 / 4, 4 / 3))
    assert boxes[0].tolist() == [0, 43, 10, 13]
    assert boxes[1].tolist() == [43, 0, 13, 10]


@given(sides, sides, st.sampled_from([0.0, 1 - 2**-53]), st.sampled_from([(0.01, 0.1), (0.5, 2), (5, 30)]))
def test_crops_lie_inside_their_image_at_the_ends_of_the_draws(width, height, draw, ratio):
    draws = np.full((1, DRAWS), draw)
    top, left, h, w = random_resized_crop_boxes(np.array([width]), np.array([height]), draws, ratio=ratio)[0]
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width


def test_a_centre_crop_takes_the_share_that_resize_and_centercrop_would_show():
    boxes = center_boxes(np.array([512, 256]), np.array([256, 1024]), (224, 224), 256)
    assert boxes.tolist() == [[16, 144, 224, 224], [400, 16, 224, 224]]
    # 500 x 333 becomes 384 x 256, of which the columns [80, 304) are taken
    (box,) = center_boxes(np.array([500]), np.array([333]), (224, 224), 256)
    assert box.tolist() == [16 * 333 / 256, 80 * 500 / 384, 224 * 333 / 256, 224 * 500 / 384]


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize("n", [1, 7, 8, 19])
def test_random_crops_equal_decode_slice_resize_within_a_level(layout, n):
    spec = Image(size=(48, 64), crop="random_resized", flip=0.5, dct="exact", layout=layout)
    encoded = [jpeg(picture(60 + 7 * i, 90 + 5 * i, i), colorsubsampling="420") for i in range(n)]
    draws = random_draws(n)
    out, failures = decoded(spec, encoded, draws)
    sizes = np.array([size_of(data) for data in encoded])
    boxes = random_resized_crop_boxes(sizes[:, 1], sizes[:, 0], draws)
    assert failures == []
    for i, data in enumerate(encoded):
        want = oracle(data, boxes[i], (48, 64), flip=draws[i, DRAW_FLIP] < 0.5)
        assert most_apart(out[i], want.transpose(2, 0, 1) if layout == "CHW" else want) <= 1


@pytest.mark.parametrize(("height", "width"), [(300, 400), (500, 333), (224, 224), (70, 90)])
@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_the_evaluation_preset_is_pillows_resize_and_centre_crop_normalised(name, height, width):
    data = jpeg(picture(height, width))
    (out,), _ = decoded(Image.for_evaluation(interpolation=name), [data])
    shorter = min(height, width)
    image = PIL.Image.fromarray(simplejpeg.decode_jpeg(data))
    image = image.resize(
        (256 * width // shorter, 256 * height // shorter), PIL.Image.Resampling[name.upper()]
    )
    top, left = (round((side - 224) / 2) for side in (image.height, image.width))
    levels = torch.from_numpy(np.asarray(image)[top : top + 224, left : left + 224].transpose(2, 0, 1).copy())
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    assert out.dtype == np.float32
    back = np.rint((torch.from_numpy(out) * std + mean).numpy() * 255).astype(int)
    assert np.abs(back - levels.numpy()).mean() < 0.2
    assert most_apart(back, levels.numpy()) <= 3
    same = torch.from_numpy(back.astype(np.uint8))
    assert torch.equal(torch.from_numpy(out), same.to(torch.float32).div(255).sub_(mean).div_(std))


def test_the_training_preset_crops_as_torchvision_and_then_resizes_as_pillow():
    data, draws = jpeg(picture(300, 400)), random_draws(1)
    spec = Image.for_training(64, dct="exact", mean=None, std=None, layout="HWC", flip=1.0)
    (out,), _ = decoded(spec, [data], draws)
    ((top, left, height, width),) = random_resized_crop_boxes(
        np.array([400]), np.array([300]), draws
    ).tolist()
    part = simplejpeg.decode_jpeg(data)[top : top + height, left : left + width]
    want = np.asarray(PIL.Image.fromarray(part).resize((64, 64), PIL.Image.Resampling.BILINEAR))[:, ::-1]
    assert most_apart(out, want) <= 1


def test_area_interpolation_is_opencvs_within_a_level():
    data = jpeg(picture(300, 400))
    out, _ = decoded(Image(size=100, interpolation="area", dct="exact"), [data])
    want = oracle(data, (0, 0, 300, 400), (100, 100), interpolation=cv2.INTER_AREA)
    assert most_apart(out[0].transpose(1, 2, 0), want) <= 1


@pytest.mark.parametrize(("height", "width"), [(400, 600), (401, 603), (1601, 900), (2403, 1999)])
def test_a_scaled_decode_shows_the_same_part_within_a_few_levels(height, width):
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([y * 255 / height, x * 255 / width, 128 + 60 * np.sin((x + y) / 97)], -1)
    data = jpeg(smooth.astype(np.uint8), quality=95)
    fast, _ = decoded(Image(size=200, layout="HWC"), [data])
    area = oracle(data, (0, 0, height, width), (200, 200), interpolation=cv2.INTER_AREA)
    difference = np.abs(fast[0].astype(int) - area)
    assert difference.max() <= 6
    assert difference.mean() < 1


@pytest.mark.parametrize(
    ("shape", "factor"), [((199, 500), 1), ((200, 200), 2), ((400, 400), 4), ((800, 904), 8)]
)
def test_only_crops_twice_the_size_are_decoded_at_half_scale(shape, factor):
    data = jpeg(picture(*shape))

    def at_scale(factor, **how):
        height, width = (-(-side // factor) for side in shape)
        least = {"min_height": height, "min_width": width, "min_factor": factor} if factor > 1 else {}
        pixels = simplejpeg.decode_jpeg(data, **how, **least)
        assert pixels.shape == (height, width, 3)
        return cv2.resize(pixels, (100, 100), interpolation=cv2.INTER_LINEAR).transpose(2, 0, 1)

    (fast,), _ = decoded(Image(size=100), [data])
    apart = {k: np.abs(fast.astype(int) - at_scale(k, fastdct=True)).mean() for k in (1, 2, 4, 8)}
    assert min(apart, key=apart.__getitem__) == factor
    (exact,), _ = decoded(Image(size=100, dct="exact"), [data])
    assert most_apart(exact, at_scale(1)) <= 1


def test_gray_from_colour_and_colour_from_gray():
    colour, gray = jpeg(picture()), jpeg(picture()[..., :1], colorspace="GRAY", colorsubsampling="Gray")
    out, failures = decoded(Image(size=(30, 40), dct="exact"), [gray])
    assert failures == []
    assert np.array_equal(out[0, 0], out[0, 1])
    for layout, shape in [("CHW", (2, 1, 30, 40)), ("HWC", (2, 30, 40, 1))]:
        out, failures = decoded(Image(size=(30, 40), mode="L", layout=layout, dct="exact"), [colour, gray])
        want = cv2.resize(simplejpeg.decode_jpeg(colour, colorspace="GRAY")[..., 0], (40, 30))
        assert failures == []
        assert out.shape == shape
        assert most_apart(out[0].reshape(30, 40), want) <= 1


def test_cmyk_becomes_rgb():
    rgb = picture()
    key = 255 - rgb.max(axis=2, keepdims=True).astype(int)
    ink = 255 - (255 - rgb - key) * 255 // np.maximum(255 - key, 1)  # Adobe stores inks inverted
    data = jpeg(np.concatenate([ink, 255 - key], 2).astype(np.uint8), colorspace="CMYK", quality=95)
    assert simplejpeg.decode_jpeg_header(data)[2] in ("CMYK", "YCCK")
    out = decode_image(Image(layout="HWC"), data)
    assert np.abs(out.astype(int) - rgb).mean() < 4


def test_png_keeps_every_pixel_and_webp_comes_close():
    pixels = picture(50, 70)
    assert np.array_equal(decode_image(Image(layout="HWC"), coded(pixels, ".png")), pixels)
    for suffix in [".bmp", ".tiff"]:
        assert np.array_equal(decode_image(Image(layout="HWC"), coded(pixels, suffix)), pixels)
    webp = coded(pixels, ".webp", cv2.IMWRITE_WEBP_QUALITY, 95)
    assert np.abs(decode_image(Image(layout="HWC"), webp).astype(int) - pixels).mean() < 4


@pytest.mark.parametrize("quality", [80, 101])
@pytest.mark.parametrize("channels", [3, 4])
def test_sizes_come_from_headers(quality, channels):
    pixels = np.dstack([picture(37, 91), np.full((37, 91), 200, np.uint8)])[..., :channels]
    webp = cv2.imencode(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, quality])[1].tobytes()
    encoded = [webp, coded(pixels[..., :3], ".png"), coded(pixels[..., :3], ".bmp"), jpeg(pixels[..., :3])]
    assert [size_of(data) for data in encoded] == [(37, 91)] * 4


def test_one_pixel_is_an_image():
    data = jpeg(np.full((1, 1, 3), 200, np.uint8))
    out, failures = decoded(Image(size=1, crop="random_resized", flip=1.0), [data], random_draws(1))
    assert failures == []
    assert np.abs(out.astype(int) - 200).max() <= 2
    assert decode_image(Image(), data).shape == (3, 1, 1)


def test_progressive_jpeg_decodes():
    data = coded(picture(), ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    assert np.array_equal(decode_image(Image(layout="HWC", dct="exact"), data), simplejpeg.decode_jpeg(data))


def test_own_size_keeps_every_pixel_in_both_layouts():
    data = jpeg(picture(31, 47))
    want = simplejpeg.decode_jpeg(data)
    assert np.array_equal(decode_image(Image(layout="HWC", dct="exact"), data), want)
    assert np.array_equal(decode_image(Image(dct="exact"), memoryview(data)), want.transpose(2, 0, 1))
    flipped = decode_image(Image(dct="exact", flip=1.0, layout="HWC"), data, random_draws(1))
    assert np.array_equal(flipped, want[:, ::-1])


def test_pixels_do_not_depend_on_the_neighbours_in_the_call():
    spec = Image(size=32, crop="random_resized", flip=0.5)
    encoded, draws = [jpeg(picture(100 + i, 120, i)) for i in range(11)], random_draws(11)
    together, _ = decoded(spec, encoded, draws)
    alone = [decoded(spec, [data], draws[i : i + 1])[0][0] for i, data in enumerate(encoded)]
    backwards, _ = decoded(spec, encoded[::-1], draws[::-1])
    assert np.array_equal(together, np.stack(alone))
    assert np.array_equal(together, backwards[::-1])


def damaged(data):
    middle = len(data) // 2
    huge = bytearray(data)
    at = huge.find(b"\xff\xc0") + 5
    huge[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    return {
        "empty": b"",
        "one byte": b"\xff",
        "junk": b"not an image at all" * 10,
        "html": b"<html>404</html>",
        "only the start": data[:2],
        "header only": data[:200],
        "truncated": data[:middle],
        "last bytes missing": data[:-40],
        "zeros inside": data[:middle] + bytes(100) + data[middle + 100 :],
        "early end marker": data[:middle] + b"\xff\xd9" + data[middle + 2 :],
        "bomb": bytes(huge),
        "png truncated": coded(picture(), ".png")[:9000],
        "png bomb": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 2**20, 2**20) + bytes(40),
        "webp truncated": coded(picture(), ".webp")[:3000],
    }


@pytest.mark.parametrize("size", [3, 200])
def test_a_jpeg_without_a_whole_header_is_called_so(size):
    _, [(_, error)] = decoded(Image(size=8), [jpeg(picture())[:size]])
    assert "its JPEG header is damaged or truncated" in str(error)


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_damaged_images_fail_alone_and_leave_zeros(layout):
    good = jpeg(picture(), colorsubsampling="420")
    bad = damaged(good)
    encoded = [good, *bad.values(), good]
    spec = Image(size=64, crop="random_resized", layout=layout)
    out, failures = decoded(spec, encoded, np.tile(random_draws(1), (len(encoded), 1)))
    assert [i for i, _ in failures] == list(range(1, len(bad) + 1))
    assert not out[1:-1].any()
    assert np.array_equal(out[0], out[-1])
    assert out[0].any()
    for _, error in failures:
        assert isinstance(error, SampleError)
        assert error.stage == "decode"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_bomb_is_named_by_its_size_and_not_decoded():
    with pytest.raises(SampleError, match="65000 x 65000 pixels are more than max_pixels"):
        decode_image(Image(size=8), damaged(jpeg(picture()))["bomb"])
    with pytest.raises(SampleError, match="300 x 400 pixels are more"):
        decode_image(Image(max_pixels=119_999), jpeg(picture()))
    assert decode_image(Image(max_pixels=120_000), jpeg(picture())).shape == (3, 300, 400)


def test_a_missing_image_is_a_failure():
    out = np.ones((1, 3, 4, 4), np.uint8)
    [(i, error)] = decode_images(Image(size=4), arrays([b""]), out, None)
    assert i == 0
    assert "empty or missing" in str(error)


def test_what_libjpeg_only_warns_about_decodes_when_not_strict():
    data = damaged(jpeg(picture()))["early end marker"]
    with pytest.raises(SampleError, match="premature end"):
        decode_image(Image(), data)
    assert decode_image(Image(strict=False), data).shape == (3, 300, 400)


def test_failures_do_not_keep_the_buffer_alive():
    encoded = bytearray(jpeg(picture())[:4000])
    buffer = np.frombuffer(encoded, np.uint8).copy()
    alive, out = weakref.ref(buffer), np.empty((1, 3, 8, 8), np.uint8)
    failures = decode_images(Image(size=8), [buffer], out, None)
    del buffer
    gc.collect()
    assert failures
    assert alive() is None


@given(st.binary(max_size=400), st.integers(0, 3000), st.booleans())
def test_any_bytes_give_a_full_row_or_a_failure(junk, at, keep_header):
    data = jpeg(picture(40, 50))
    mixed = data[: at % len(data)] + junk + data[at % len(data) + len(junk) :] if keep_header else junk
    out, failures = decoded(Image(size=16), [data, mixed, data])
    assert np.array_equal(out[0], out[2])
    assert [i for i, _ in failures] in ([], [1])


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"crop": "center"}, "needs a size"),
        ({"crop": "middle", "size": 3}, "crop must be one of 'random_resized', 'center', 'none'"),
        ({"mode": "BGR"}, "mode must be one of"),
        ({"layout": "NHWC"}, "layout must be one of"),
        ({"interpolation": "cubic"}, "interpolation must be one of"),
        ({"dct": "slow"}, "dct must be one of"),
        ({"size": 0}, "size must be at least 1"),
        ({"size": (4, 0)}, "size must be at least 1"),
        ({"size": (3,)}, "size must be a number or"),
        ({"size": "224"}, "size must be a number or"),
        ({"scale": (0.5, 0.1)}, "scale must be"),
        ({"scale": (0.0, 1.0)}, "scale must be"),
        ({"ratio": (2.0, 1.0)}, "ratio must be"),
        ({"flip": 1.5}, "flip is a probability"),
        ({"size": 8, "resize_shorter": 9}, "for crop='center' only"),
        ({"size": 8, "crop": "center", "resize_shorter": 7}, "less than size"),
        ({"max_pixels": 0}, "max_pixels"),
        ({"interpolation": "area", "antialias": True}, '"area" averages by itself'),
        ({"mean": (0.5, 0.5, 0.5)}, "mean and std go together"),
        ({"mean": (0.5,), "std": (0.5,)}, "need 3 numbers with mode='RGB'"),
        ({"mean": (0.5,) * 3, "std": (0.5, 0.5, 0.0)}, "std greater than 0"),
        ({"mean": (0.5, float("nan"), 0.5), "std": (0.5,) * 3}, "mean must be finite"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings_, words):
    with pytest.raises(ValueError, match=words):
        Image(**settings_)


def test_out_must_fit():
    data = arrays([jpeg(picture())])
    for out in [
        np.empty((1, 3, 8, 9), np.uint8),
        np.empty((2, 3, 8, 8), np.uint8),
        np.empty((1, 3, 8, 8), np.float32),
        np.empty((1, 8, 8, 3), np.uint8).transpose(0, 3, 1, 2),
    ]:
        with pytest.raises(ValueError, match="out must be C-contiguous"):
            decode_images(Image(size=8), data, out, None)
    with pytest.raises(ValueError, match="need draws"):
        decode_image(Image(size=8, flip=0.5), jpeg(picture()))
    with pytest.raises(ValueError, match="size is None"):
        decode_images(Image(), data, np.empty((1, 3, 8, 8), np.uint8), None)


def test_without_the_packages_the_error_names_the_extra(monkeypatch):
    images._codec.cache_clear()
    monkeypatch.delitem(sys.modules, "dataflow.decode.jpeg", raising=False)
    monkeypatch.delattr("dataflow.decode.jpeg", raising=False)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(MissingImageSupportError, match=r"pip install 'dataflow-loader\[image\]'") as caught:
        decode_image(Image(size=8), b"anything")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, DataflowError)
