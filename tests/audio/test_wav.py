"""Sounds: what a file holds at any rate, and files that nobody vouches for."""

from __future__ import annotations

import io
import math
import random
import struct
import subprocess
import sys
import wave

import numpy as np
import pytest
import torch

import lmstate
from lmstate.audio.wav import MOST_BYTES, read_wav, resampled


def wav(samples: torch.Tensor, rate: int = 16_000, width: int = 2) -> bytes:
    """A WAV file of samples `[N]` or `[N, channels]` from -1 to 1."""
    data = samples if samples.ndim == 2 else samples[:, None]
    whole = (data.double() * (2 ** (8 * width - 1) - 1)).round().to(torch.int64).flatten()
    if width == 1:
        raw = (whole + 128).to(torch.uint8).numpy().tobytes()
    else:
        raw = whole.numpy().astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(data.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return out.getvalue()


def tone(hertz: float, rate: int, seconds: float = 0.5) -> torch.Tensor:
    return (0.5 * torch.sin(torch.arange(int(rate * seconds)).double() * (2 * math.pi * hertz / rate))).float()


@pytest.mark.parametrize("width, step", [(1, 2**-7), (2, 2**-15), (3, 2**-23), (4, 2**-24)])
def test_samples_are_those_that_were_written(width: int, step: float) -> None:
    samples = tone(440, 16_000)
    read = read_wav(wav(samples, width=width), 16_000)
    assert read.dtype == torch.float32 and read.shape == samples.shape
    torch.testing.assert_close(read, samples, atol=1.5 * step, rtol=0)


def test_channels_are_averaged() -> None:
    left, right = tone(300, 16_000), tone(500, 16_000)
    read = read_wav(wav(torch.stack([left, right], 1)), 16_000)
    torch.testing.assert_close(read, (left + right) / 2, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rate", [4_000, 8_000, 11_025, 22_050, 24_000, 44_100, 44_101, 48_000, 96_000])
def test_a_tone_is_the_same_tone_at_another_rate(rate: int) -> None:
    """What both rates can hold stays as it is, to 60 dB; what the lower cannot goes."""
    made = resampled(tone(1_234, rate), rate, 16_000)
    assert len(made) == math.ceil(len(tone(1_234, rate)) * 16_000 / rate)
    inner = slice(1_000, len(made) - 1_000)
    torch.testing.assert_close(made[inner], tone(1_234, 16_000, 1)[: len(made)][inner], atol=5e-4, rtol=0)
    if rate > 20_000:
        assert resampled(tone(9_500, rate), rate, 16_000)[inner].abs().max() < 5e-4


def test_hostile_files_are_refused() -> None:
    whole = wav(tone(440, 8_000, 0.1), 8_000)
    header = whole[:44]

    def with_header(at: int, kind: str, value: int) -> bytes:
        return header[:at] + struct.pack(kind, value) + header[at + struct.calcsize(kind) :] + whole[44:]

    for bad, why in (
        (b"", "damaged"), (b"RIFF", "damaged"), (b"ID3" + whole, "damaged"), (whole[:-10], "cut short"),
        (header, "cut short"), (with_header(20, "<H", 7), "damaged"), (with_header(20, "<H", 3), "damaged"),
        (with_header(22, "<H", 0), "damaged|channels"), (with_header(22, "<H", 60_000), "channels"),
        (with_header(24, "<I", 0), "samples per second"), (with_header(24, "<I", 2**31), "samples per second"),
        (with_header(34, "<H", 0), "damaged|bits"), (with_header(40, "<I", 2**32 - 2), "seconds"),
        (wav(torch.zeros(0)), "no samples"), ("text", "bytes of a WAV"), (None, "bytes of a WAV"),
        (whole[:36] + bytes(8) * 1_000 + whole[36:], "1000 chunks"),
        (b"0" * (MOST_BYTES + 1), "may have"), (wav(tone(440, 16_000, 3)), "3\\.0 seconds"),
    ):  # fmt: skip
        with pytest.raises(lmstate.StateError, match=why):
            read_wav(bad, 16_000, most_seconds=2)  # type: ignore[arg-type]


def test_chunks_in_front_of_the_samples_are_passed_over() -> None:
    whole = wav(tone(440, 16_000, 0.1))
    title = b"LIST" + struct.pack("<I", 5) + b"title\0"
    long = whole[:36] + title * 900 + whole[36:]
    long = long[:4] + struct.pack("<I", len(long) - 8) + long[8:]
    assert torch.equal(read_wav(long, 16_000), read_wav(whole, 16_000))


def test_damaged_files_give_a_sound_or_an_error() -> None:
    luck, whole = random.Random(0), wav(tone(440, 8_000, 0.02), 8_000)
    read = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(luck.randint(1, 3)):
            damaged[luck.randrange(60)] = luck.randrange(256)
        try:
            made = read_wav(bytes(damaged[: luck.choice([len(whole), luck.randrange(len(whole))])]), 16_000)
        except lmstate.StateError:
            continue
        read += 1
        assert bool(made.isfinite().all()) and made.abs().max() < 2
    assert read > 20


def test_long_sounds_take_little_more_memory_than_their_samples() -> None:
    """Resampled in parts that were joined at the end, half an hour once took ten gigabytes."""
    program = (
        "import resource, torch\n"
        "from lmstate.audio.wav import resampled\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "large = torch.zeros(7_000_000)\n"
        "del large  # from here on the allocator keeps large blocks among small ones\n"
        "sound = torch.zeros(1_000_000)\n"
        "before = peak()\n"
        "made = resampled(sound, 4_000, 16_000)\n"
        "print(1024 * (peak() - before), made.nbytes)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, made = map(int, ran.stdout.split())
    assert grown < made + 2**27
