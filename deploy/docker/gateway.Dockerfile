# The gateway, and `serve check` and `serve deploy gate` for a cluster's jobs: no torch, no ONNX Runtime, no Triton.
# From the project's root: docker buildx build -f deploy/docker/gateway.Dockerfile --sbom=true --provenance=true .
# Pin the base by its digest: --build-arg PYTHON=python@sha256:…
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
WORKDIR /src
RUN python -m venv /opt/serve
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY compress ./compress
COPY serve ./serve
# Packages hold files for other releases of Python, too: what this one can't compile is left.
RUN /opt/serve/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check -c constraints.txt ".[serve,otel,sign]" \
    && /opt/serve/bin/pip uninstall --quiet --yes pip setuptools \
    && find /opt/serve -name __pycache__ -prune -exec rm -r {} + \
    && (python -m compileall -qq --invalidation-mode unchecked-hash /opt/serve/lib || true)

FROM ${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="compress-serve gateway" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Else /etc/shadow has the day of the build.
RUN SOURCE_DATE_EPOCH=0 useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin serve \
    && install --directory --owner=1000 --group=1000 /var/lib/gateway
COPY --from=build /opt/serve /opt/serve
COPY --chmod=755 deploy/docker/http-ok /usr/local/bin/
ENV PATH=/opt/serve/bin:${PATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["http-ok", "http://127.0.0.1:8080/healthz"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["serve"]
CMD ["gateway", "--help"]
