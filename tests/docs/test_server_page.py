"""Every curl line of the server's page answers, against SmolLM2, and the page names every route."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

import lmstate
from lmstate.cli.app import app
from lmstate.engine import Engine
from lmstate.serve import Settings
from lmstate.serve.app import PATHS
from tests.real_model import smollm2
from tests.serve.running import running

SERVED = {name for given in get_command(app).commands["serve"].params for name in given.opts}  # type: ignore[attr-defined]
PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.S | re.M)
    return [command for block in blocks for command in re.split(r"\n(?=curl )", block.strip())]


def test_the_curl_lines_answer(tmp_path: Path) -> None:
    lines = [line for line in commands() if "/audio/" not in line]  # which tests/serve/test_transcriptions.py asks
    assert len(lines) > 30
    settings = Settings("smollm2", port=0)
    with Engine(lmstate.load(str(smollm2())), rows=2) as engine, running(engine, settings) as server:
        for line in lines:
            arguments = shlex.split(line.replace("$BASE", server.url), comments=True)
            assert arguments[0] == "curl"
            made = subprocess.run(
                [*arguments, "--silent", "--show-error", "--fail-with-body", "--max-time", "600"],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "no_proxy": "127.0.0.1"},
                check=False,
            )
            assert made.returncode == 0, f"{line}\n{made.stdout}{made.stderr}"
            if "metrics" not in line and "stream" not in line and " -o " not in line:
                answer = json.loads(made.stdout)
                assert isinstance(answer, list) or answer.get("error") is None


def test_the_page_names_every_route() -> None:
    named = {re.sub(r"\{[^}]*\}", "X", one.path) for one in PATHS}
    written = set()
    for line in commands():
        path = re.search(r"\$BASE(\S+)", line)
        assert path is not None
        written.add(re.sub(r"(sessions|models)/[^/]+", r"\1/X", path[1].partition("?")[0].rstrip('"')))
    by_id = {path for path in named if path.startswith(("/v1/responses/X", "/v1/conversations/X"))}
    assert named - written - by_id == {"/v1/sessions/X/save", "/v1/replicas/drain"}  # need a folder, and replicas
    for said in ("POST .../save", "`/v1/replicas/drain`", "`/cancel`", "`/input_items`", "with its `/items`"):
        assert said in PAGE


@pytest.mark.parametrize("option", sorted(set(re.findall(r"(--[a-z][a-z-]+)", PAGE.split("## OpenAI")[0]))))
def test_options_on_the_page_exist(option: str) -> None:
    assert option in SERVED
