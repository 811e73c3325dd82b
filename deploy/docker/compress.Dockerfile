# Compression jobs on CPUs: `compress export model.pt … -o artifact`, with a folder mounted at /data.
# From the project's root: docker buildx build -f deploy/docker/compress.Dockerfile --sbom=true --provenance=true .
# Pin the base by its digest: --build-arg PYTHON=python@sha256:…
# TORCH_INDEX is an index of CPU wheels; without it pip brings CUDA, several GB.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/compress
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY compress ./compress
COPY serve ./serve
# Packages hold files for other releases of Python, too: what this one can't compile is left.
RUN /opt/compress/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check -c constraints.txt \
      ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} ".[compress,finetune]" \
    && /opt/compress/bin/pip uninstall --quiet --yes pip setuptools \
    && find /opt/compress -name __pycache__ -prune -exec rm -r {} + \
    && (python -m compileall -qq --invalidation-mode unchecked-hash /opt/compress/lib || true)

FROM ${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="compress-serve compression" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Else /etc/shadow has the day of the build.
RUN SOURCE_DATE_EPOCH=0 useradd --uid 1000 --user-group --create-home --shell /usr/sbin/nologin compress
COPY --from=build /opt/compress /opt/compress
ENV PATH=/opt/compress/bin:${PATH} PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /data
USER 1000:1000
HEALTHCHECK NONE
ENTRYPOINT ["compress"]
CMD ["--help"]
