# The HTTP front: no torch, no model files.  docker build -f deploy/gateway.Dockerfile -t pagekeeper-gateway .
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pip reads these, for a registry of your own.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv --without-pip /opt/pagekeeper
WORKDIR /src
# What is installed changes seldom: a layer of its own.
COPY pyproject.toml constraints.txt deploy/requirements.py ./
# All that tokenizers asks for is the model hub's client, 30 MB that the gateway never calls.
RUN python requirements.py pyproject.toml gateway > wanted.txt \
 && grep -v ^tokenizers wanted.txt > whole.txt && grep ^tokenizers wanted.txt > alone.txt \
 && python -m pip --python /opt/pagekeeper/bin/python install -c constraints.txt -r whole.txt \
 && python -m pip --python /opt/pagekeeper/bin/python install -c constraints.txt --no-deps -r alone.txt
COPY README.md LICENSE ./
COPY wire wire
COPY gateway gateway
RUN python -m pip --python /opt/pagekeeper/bin/python install --no-deps .

FROM python:3.11-slim-bookworm
# One user id in all images: the sockets lie in a directory that only their owner may enter.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin pagekeeper \
 && install -d -m 0700 -o pagekeeper -g pagekeeper /run/pagekeeper
COPY --from=build /opt/pagekeeper /opt/pagekeeper
ENV PATH=/opt/pagekeeper/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_RUN_DIR=/run/pagekeeper GATEWAY_HOST=0.0.0.0 GATEWAY_PORT=8000
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
ENTRYPOINT ["python", "-m", "gateway"]
