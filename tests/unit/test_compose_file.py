"""What docker-compose.yml promises, read from the file itself. Starts no container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
SECRETS = ("POSTGRES_PASSWORD", "RAY_AUTH_TOKEN")
RAY_SERVICES = ("ray-head", "worker", "worker-gpu", "orch")
FROM_ENV_FILE = re.compile(r"\$\{(\w+):\?[^}]+\}")  # a variable that must be set: compose refuses to start without it


@pytest.fixture(scope="module")
def services() -> Mapping[str, Any]:
    """The services with anchors and merges resolved, as compose sees them before it fills in variables."""
    return YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())["services"]


def variables(service: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def texts(value: Any) -> Iterator[str]:
    """Every text below a value, keys left out."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from texts(one)
    else:
        yield str(value)


def test_every_secret_comes_from_the_env_file_and_compose_refuses_to_start_without_it(services: Mapping[str, Any]):
    found = set()
    for service in services.values():
        for name, value in variables(service).items():
            if name in SECRETS:
                assert FROM_ENV_FILE.fullmatch(value), f"{name} must be all from .env"
                found.add(name)
    assert found == set(SECRETS)


def test_a_url_holds_no_literal_password(services: Mapping[str, Any]):
    urls = {text for service in services.values() for text in texts(service) if re.search(r"://[^/]*@", text)}
    assert urls, "the database's URL is in the file"
    for url in urls:
        password = re.search(r"://[^:@/]+:(.*)@", url)
        assert password is not None
        assert FROM_ENV_FILE.fullmatch(password[1])


def test_secrets_stand_on_no_command_line(services: Mapping[str, Any]):
    for name, service in services.items():
        for key in ("command", "entrypoint", "healthcheck"):
            assert "${" not in " ".join(texts(service.get(key, []))), f"{name}.{key}"


def test_the_example_leaves_the_secrets_empty_and_git_and_the_image_leave_out_the_real_ones():
    example = (ROOT / ".env.example").read_text().splitlines()
    assert [line for line in example if line.startswith(SECRETS)] == [f"{name}=" for name in SECRETS]
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert not any(line.startswith("!.env") for line in ignored)


def test_the_database_user_is_not_called_as_our_schema(services: Mapping[str, Any]):
    # PostgreSQL's default search path begins with the user's name: MLflow's tables would land among our views
    user = variables(services["postgres"])["POSTGRES_USER"]
    assert user != "orch"
    urls = [value for one in services.values() for name, value in variables(one).items() if name.endswith("_URL")]
    assert urls
    assert all(f"://{user}:" in url for url in urls)


def test_every_published_port_is_on_loopback(services: Mapping[str, Any]):
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert all(service.get("network_mode") != "host" for service in services.values())


@pytest.mark.parametrize("name", RAY_SERVICES)
def test_every_ray_node_wants_the_token(services: Mapping[str, Any], name: str):
    assert variables(services[name])["RAY_AUTH_MODE"] == "token"
    assert variables(services[name])["RAY_AUTH_TOKEN"] == variables(services["ray-head"])["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("name", ["mlflow", *RAY_SERVICES])
def test_nothing_reports_to_anybody(services: Mapping[str, Any], name: str):
    assert variables(services[name])["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert variables(services[name])["RAY_USAGE_STATS_ENABLED"] == "0"


def test_ray_nodes_run_under_what_a_local_ray_is_started_with(services: Mapping[str, Any]):
    from orchestrator.execution.ray_tune.environment import TUNE_AND_RAY

    of_nodes = {name: value for name, value in TUNE_AND_RAY.items() if name.startswith(NODE_VARIABLES)}
    assert len(of_nodes) == len(NODE_VARIABLES)
    for service in RAY_SERVICES:
        assert of_nodes.items() <= variables(services[service]).items()


# Read by Ray's own processes; the others of TUNE_AND_RAY are for the driver.
NODE_VARIABLES = (
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_worker_niceness",
    "RAY_enable_worker_prestart",
    "RAY_prestart_worker_first_driver",
)


def test_every_service_has_a_health_check_or_says_why_not(services: Mapping[str, Any]):
    for name, service in services.items():
        assert service.get("healthcheck", {}).get("test") or service.get("x-no-healthcheck"), name


def test_the_database_is_published_by_the_override_only_and_on_loopback(services: Mapping[str, Any]):
    assert "ports" not in services["postgres"]
    outside = YAML(typ="safe").load((ROOT / "docker/outside.yml").read_text())["services"]
    assert outside == {"postgres": {"ports": ["127.0.0.1:${POSTGRES_PORT:-5432}:5432"]}}


def test_only_the_head_of_the_ray_nodes_knows_the_database(services: Mapping[str, Any]):
    knowing = {name for name in RAY_SERVICES if "ORCH_DATABASE_URL" in variables(services[name])}
    assert knowing == {"ray-head", "orch"}  # submitted sweeps are driven on the head


def test_what_a_dead_container_left_in_its_journal_is_found_by_the_next_one(services: Mapping[str, Any]):
    for name in RAY_SERVICES:
        assert variables(services[name])["ORCH_JOURNAL_DIR"] == "/journal"
        assert variables(services[name])["ORCH_JOURNAL_HOST"], "the names of containers change"
        assert "journal:/journal" in services[name]["volumes"]


def test_all_nodes_find_artifacts_under_the_same_path(services: Mapping[str, Any]):
    root = variables(services["orch"])["ORCH_ARTIFACT_ROOT"]
    assert root.startswith("file:///shared/")
    for name in ("mlflow", *RAY_SERVICES):
        assert "shared:/shared" in services[name]["volumes"], name


def test_only_the_gpu_profile_asks_for_a_gpu(services: Mapping[str, Any]):
    reserving = {name for name, service in services.items() if "deploy" in service}
    assert reserving == {"worker-gpu"}
    assert services["worker-gpu"]["profiles"] == ["gpu"]


def test_the_image_runs_as_a_user_without_rights_and_holds_no_secret():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER orch"]
    assert not any(name in line for name in SECRETS for line in lines)
