# Triton for CPUs from its Python wheel, laid out as NVIDIA's image has it: the same repository, flags and probes, in some
# hundred megabytes. Its Triton (24.10) has known vulnerabilities: only behind the gateway, on a network without a way in.
# From the project's root; what the hooks require is read from deploy/docker/hooks.txt, where it is
# (`serve deploy requirements REPOSITORY`). Pin the base by its digest: --build-arg PYTHON=python@sha256:…
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
WORKDIR /src
RUN python -m venv /opt/serve
COPY pyproject.toml constraints.txt README.md LICENSE deploy/docker/hooks.tx[t] ./
COPY compress ./compress
COPY serve ./serve
RUN touch hooks.txt \
    && /opt/serve/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check -c constraints.txt \
      -r hooks.txt ".[triton,sign]" \
    && XDG_CACHE_HOME=/opt/wheel /opt/serve/bin/serve triton install
# Packages hold files for other releases of Python, too: what this one can't compile is left.
# NumPy 1 in place of the environment's, the stub of this Python alone, our ONNX Runtime backend in place of the C++ one.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN site=$(echo /opt/serve/lib/python3.*/site-packages) wheel=$(echo /opt/wheel/compress-serve/triton-*) \
    && server=$wheel/packages/pytriton/tritonserver version=$(basename "${site%/site-packages}") \
    && /opt/serve/bin/pip uninstall --quiet --yes numpy pip setuptools \
    && cp -r "$wheel"/numpy/. "$wheel"/packages/nvidia_pytriton-*.dist-info "$site" \
    && mkdir -p /opt/tritonserver/lib \
    && cp -r "$server"/{bin,backends,caches} /opt/tritonserver \
    && cp "$wheel"/packages/nvidia_pytriton.libs/* /opt/tritonserver/lib \
    && cp "$server/python_backend_stubs/${version#python}/triton_python_backend_stub" /opt/tritonserver/backends/python \
    && cp -r "$site"/serve/triton/backends/*/ /opt/tritonserver/backends \
    && find /opt/serve /opt/tritonserver -name __pycache__ -prune -exec rm -r {} + \
    && (python -m compileall -qq --invalidation-mode unchecked-hash "$site" /opt/tritonserver/backends || true)

FROM ${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="compress-serve Triton for CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0 AND BSD-3-Clause"
# Else /etc/shadow has the day of the build.
RUN SOURCE_DATE_EPOCH=0 useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin triton-server \
    && mkdir /models
COPY --from=build /opt/tritonserver /opt/tritonserver
COPY --from=build /opt/serve /opt/serve
COPY --chmod=755 deploy/docker/http-ok /usr/local/bin/
ENV PATH=/opt/serve/bin:/opt/tritonserver/bin:${PATH} LD_LIBRARY_PATH=/opt/tritonserver/lib HOME=/tmp \
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["http-ok", "http://127.0.0.1:8000/v2/health/ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tritonserver"]
CMD ["--model-repository=/models", "--disable-auto-complete-config", "--model-control-mode=none"]
