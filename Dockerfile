# One image for everything of ours: MLflow's server, the Ray nodes, the command `orch`. Holds no secret.
FROM docker.io/library/python:3.11-slim AS requirements
COPY pyproject.toml .
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; extras = project['optional-dependencies']; \
      print(*project['dependencies'], *extras['cluster'], *extras['s3'], sep='\n')" > /requirements.txt

FROM docker.io/library/python:3.11-slim
# An index besides PyPI, for example PyTorch's CPU-only wheels (the default wheels bring CUDA, several gigabytes).
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# The dependencies first and alone: this layer stays as it is until their list or a pinned version changes.
WORKDIR /build
COPY --from=requirements /requirements.txt ./
COPY constraints.txt ./
RUN python -m pip install -c constraints.txt -r requirements.txt

COPY pyproject.toml README.md LICENSE ./
COPY orchestrator orchestrator
COPY workloads workloads
COPY dashboards dashboards
RUN python -m pip install --no-deps . && rm -rf /build/*
COPY --chmod=755 docker/entrypoint.sh /usr/local/bin/orch-entrypoint
COPY --chmod=644 docker/wait_for_database.py /usr/local/lib/orch/wait_for_database.py

# Volumes take the owner of these folders when they are first used.
RUN useradd --uid 1000 --create-home orch \
 && install -d -o orch -g orch /shared /shared/artifacts /workspace \
 && install -d -o orch -g orch -m 700 /home/orch/.orch /journal
USER orch
WORKDIR /workspace
ENTRYPOINT ["orch-entrypoint"]
CMD ["orch", "--help"]
