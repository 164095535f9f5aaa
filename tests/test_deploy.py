"""The files in deploy/: they parse, and every command in them and in docs/for-it.md is one that exists."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from fedhassle.cli.main import app
from fedhassle.federation.agreement import parsed_address

ROOT = Path(__file__).resolve().parents[1]
DEPLOY, PAGE = ROOT / "deploy", (ROOT / "docs" / "for-it.md").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]


def parse(words):
    """Parses a command of fedhassle without running it; returns its name and what was given."""
    command, words = get_command(app), list(words)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, words) as context:
        return command.name, context.params


def test_the_services_run_a_server_and_three_nodes():
    name, given = parse(SERVICES["coordinator"]["command"])
    assert name == "server" and parsed_address(given["status"], listening=True) == ("0.0.0.0", 8444)
    sites = {name: service for name, service in SERVICES.items() if name != "coordinator"}
    assert sorted(sites) == ["east", "north", "south"]
    for name, service in sites.items():
        assert parse(service["command"])[0] == "node" and service["networks"] == [name]
        assert "ports" not in service and f"./images/{name}:/images:ro" in service["volumes"]
        assert service["depends_on"]["coordinator"]["condition"] == "service_healthy"
    networks = [network for service in sites.values() for network in service["networks"]]
    assert sorted(networks) == sorted(SERVICES["coordinator"]["networks"]) == sorted(COMPOSE["networks"])
    named = {volume.split(":")[0] for one in SERVICES.values() for volume in one["volumes"]}
    assert {volume for volume in named if not volume.startswith(".")} == COMPOSE["volumes"].keys()


def test_only_the_sites_port_is_published_to_other_machines():
    assert SERVICES["coordinator"]["ports"] == ["8443:8443", "127.0.0.1:8444:8444"]
    compile(SERVICES["coordinator"]["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert all(one["cap_drop"] == ["ALL"] and one["init"] for one in SERVICES.values())


def test_the_image_copies_files_that_exist_and_does_not_run_as_root():
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    copied = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = re.search(r"^ARG EXTRAS=(.*)", text, re.MULTILINE)[1].split(",")
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    assert re.findall(r"^USER (.*)", text, re.MULTILINE) == ["fedhassle"]
    assert COMPOSE["services"]["north"]["build"]["dockerfile"] == "deploy/Containerfile"


@pytest.mark.parametrize("role", ["server", "node"])
def test_the_units_start_a_command_that_exists(role):
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "systemd" / f"fedhassle-{role}.service")
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/bin/fedhassle") and parse(words)[0] == role
    assert unit["Service"]["User"] == "fedhassle" and unit["Service"]["Restart"] == "always"
    if role == "node":
        assert "IMAGES=" in (DEPLOY / "systemd" / "node.env").read_text("utf-8")


def test_the_commands_of_the_page_exist():
    """Those of fedhassle itself, and those in containers, whose entry point is fedhassle."""
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
    found = set()
    for line in lines:
        words = shlex.split(line.replace("$site", "north"), comments=True)
        if "fedhassle" in [Path(word).name for word in words[:4]] or words[:3] == [
            "docker",
            "compose",
            "exec",
        ]:
            inside = [k for k, word in enumerate(words) if Path(word).name == "fedhassle"]
            if inside and words[inside[-1] + 1 : inside[-1] + 2] == ["federation"]:
                found.add(parse(words[inside[-1] + 1 :])[0])
        if words[:3] == ["docker", "compose", "run"] and "--entrypoint" not in words:
            service = next(k for k, word in enumerate(words) if word in SERVICES)
            found.add(parse(words[service + 1 :])[0])
    assert found == {"init", "join", "admit", "run"}
