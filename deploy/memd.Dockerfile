# The memory daemon: the smallest of the three.  docker build -f deploy/memd.Dockerfile -t pagekeeper-memd .
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pip reads these, for a registry of your own.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv --without-pip /opt/pagekeeper
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python requirements.py pyproject.toml > wanted.txt \
 && python -m pip --python /opt/pagekeeper/bin/python install -c constraints.txt -r wanted.txt
# memd's core is compiled here: there is no compiler where it runs. A distribution's own Python keeps its headers apart.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev \
 && { test -e "$(python -c 'import sysconfig as s; print(s.get_path("include"))')/Python.h" \
      || apt-get install -y -qq --no-install-recommends python3-dev; } \
 && rm -rf /var/lib/apt/lists/* \
 && python -m pip --python /opt/pagekeeper/bin/python install --target /opt/compiler -c constraints.txt mypy setuptools
COPY README.md LICENSE ./
COPY wire wire
COPY memd memd
RUN python -m pip --python /opt/pagekeeper/bin/python install --no-deps . \
 && PYTHONPATH=/opt/compiler /opt/pagekeeper/bin/python -m memd.compiled /opt/pagekeeper/cores

FROM python:3.11-slim-bookworm
# One user id in all images: the sockets lie in a directory that only their owner may enter.
# /var/lib/pagekeeper holds the epoch, a number that must rise with every start.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin pagekeeper \
 && install -d -m 0700 -o pagekeeper -g pagekeeper /run/pagekeeper /var/lib/pagekeeper
COPY --from=build /opt/pagekeeper /opt/pagekeeper
ENV PATH=/opt/pagekeeper/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PAGEKEEPER_CORES=/opt/pagekeeper/cores MEMD_RUN_DIR=/run/pagekeeper MEMD_STATE_DIR=/var/lib/pagekeeper MEMD_ADMIN_HOST=0.0.0.0 MEMD_ADMIN_PORT=9100
USER 10001:10001
EXPOSE 9100
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9100/health', timeout=2)"]
ENTRYPOINT ["python", "-m", "memd"]
