"""Sounds from untrusted files: WAV, read by the standard library within limits, at the rate that a model hears at."""

from __future__ import annotations

import io
import math
import struct
import wave
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmstate.errors import StateError

MOST_BYTES = 2**27  # of a file
MOST_SECONDS = 1800  # of a sound
MOST_CHANNELS = 8
MOST_CHUNKS = 1_000  # in front of the samples: titles and the like are a few
RATES = (4_000, 192_000)  # samples per second, lowest and highest
ZEROS = 24  # of the sinc on each side: the filter's length
ROLLOFF = 0.95  # of the lower rate's highest frequency, from where on the filter falls
BLOCK = 2**20  # products that are made at a time: several for each sample


def sound_file(path: Path) -> bytes:
    """The content of a WAV file, checked as `read_wav` does.

    Raises `StateError`, which names the file, for anything but a sound; `OSError` for a file that cannot be read.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise StateError(f"a sound has {size} bytes; it may have {MOST_BYTES}")
        check_wav(content := path.read_bytes())
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    return content


def read_wav(data: bytes, rate: int, most_seconds: float = MOST_SECONDS) -> Tensor:
    """A sound, one channel at `rate` samples per second: float32 `[N]` of numbers from -1 to 1.

    Channels are averaged. Raises `StateError` for a file that is too large or too long, cut short, or no WAV of whole
    numbers: its length is checked before anything is unpacked.
    """
    samples, own_rate = _unpacked(data, most_seconds)
    return resampled(samples, own_rate, rate)


def check_wav(data: bytes) -> None:
    """Raise as `read_wav` for anything but a WAV file that it reads."""
    _unpacked(data, MOST_SECONDS)


def _unpacked(data: bytes, most_seconds: float) -> tuple[Tensor, int]:
    """The samples of a WAV file, float32 `[N]`, and how many are of a second. Raises as `read_wav`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateError(f"a sound is {data!r:.80}; give the bytes of a WAV file")
    if len(data) > MOST_BYTES:
        raise StateError(f"a sound has {len(data)} bytes; it may have {MOST_BYTES}")
    _check_chunks(data)
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, own_rate, count = file.getparams()[:4]
            _check(channels, width, own_rate, count, most_seconds)
            frames = file.readframes(count)
    # The reader of damaged files raises whatever it comes upon.
    except StateError:
        raise
    except Exception as error:
        why = str(error) or "it ends too early"
        raise StateError(
            f"a sound is damaged, or no WAV of whole numbers: {why[:120]}; convert it first, for example with "
            "ffmpeg -i FILE -c:a pcm_s16le FILE.wav"
        ) from error
    if len(frames) != count * channels * width:
        raise StateError(f"a sound is cut short: it has {len(frames)} of {count * channels * width} bytes of samples")
    return _numbers(frames, width).view(count, channels).mean(1), own_rate


def seconds_of(data: bytes) -> float:
    """The length of a WAV file that `read_wav` has read."""
    with wave.open(io.BytesIO(data)) as file:
        return file.getnframes() / file.getframerate()


def _check_chunks(data: bytes | bytearray | memoryview) -> None:
    """Raise `StateError` for a file whose samples are behind too many chunks, which take long to walk through."""
    at = len("RIFFsizeWAVE")
    for _ in range(MOST_CHUNKS):
        if at + 8 > len(data):
            return
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"data":
            return
        at += 8 + size + size % 2
    raise StateError(f"a sound has more than {MOST_CHUNKS} chunks in front of its samples; convert it first")


def _check(channels: int, width: int, rate: int, count: int, most_seconds: float) -> None:
    """Raise `StateError` for a sound that is not read."""
    if not 1 <= channels <= MOST_CHANNELS:
        raise StateError(f"a sound has {channels} channels; it may have {MOST_CHANNELS}")
    if width not in (1, 2, 3, 4):
        raise StateError(f"a sound has samples of {8 * width} bits; they are of 8, 16, 24 or 32")
    if not RATES[0] <= rate <= RATES[1]:
        raise StateError(f"a sound has {rate} samples per second; from {RATES[0]} to {RATES[1]} are read")
    if count > most_seconds * rate:
        raise StateError(f"a sound has {count / rate:.1f} seconds; it may have {most_seconds:g}")
    if not count:
        raise StateError("a sound has no samples")


def _numbers(frames: bytes, width: int) -> Tensor:
    """Whole numbers of `width` bytes -> float32 from -1 to 1."""
    raw = np.frombuffer(frames, np.uint8)
    if width == 1:  # without a sign
        return torch.from_numpy(raw.astype(np.float32) - 128) / 128
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = raw.reshape(-1, width)  # the low bytes are zero
    return torch.from_numpy(wide.view("<i4")[:, 0].astype(np.float32)) / 2**31


def resampled(samples: Tensor, rate: int, to: int) -> Tensor:
    """Samples float32 `[N]` at another rate: `[ceil(N * to / rate)]`.

    Frequencies that the lower of both rates cannot hold are filtered out, by a sinc under a Hann window (J. O. Smith,
    Digital Audio Resampling).
    """
    divisor = math.gcd(rate, to)
    step, phases = rate // divisor, to // divisor
    if step == phases:
        return samples
    table, reach = _filters(step, phases)
    padded = torch.nn.functional.pad(samples, (reach, reach + 1))
    taps = torch.arange(table.shape[1])
    made = samples.new_empty(-(-len(samples) * phases // step))  # all of it first: parts would scatter the memory
    size = max(1, BLOCK // len(taps))
    for begin, part in zip(range(0, len(made), size), made.split(size)):
        at = torch.arange(begin, begin + len(part))
        near = (at * step).div(phases, rounding_mode="floor")  # the sample at or before, which is at `reach`
        torch.sum(padded[near[:, None] + taps] * table[at % phases], 1, out=part)
    return made


@lru_cache(maxsize=4)
def _filters(step: int, phases: int) -> tuple[Tensor, int]:
    """Weights of the samples around each of the `phases` places between two of them, float32 `[phases, 2 reach + 1]`.

    `step / phases` samples are between two new ones.
    """
    cutoff = ROLLOFF * min(1.0, phases / step)
    reach = math.ceil(ZEROS / cutoff)
    between = (torch.arange(phases).double() * step % phases / phases)[:, None]
    distance = (torch.arange(-reach, reach + 1).double()[None] - between) * cutoff
    window = torch.cos(distance.clamp(-ZEROS, ZEROS) * (math.pi / 2 / ZEROS)) ** 2
    return (torch.sinc(distance) * window * cutoff).float(), reach
