# NVIDIA's Triton with what the repository's hooks require (`serve deploy requirements REPOSITORY > hooks.txt`).
# From this folder, with hooks.txt in it: docker buildx build -f …/triton.Dockerfile --sbom=true --provenance=true .
# Pin the base by its digest: --build-arg TRITON=nvcr.io/nvidia/tritonserver@sha256:…
# Releases before 26.07 have known vulnerabilities.
ARG TRITON=nvcr.io/nvidia/tritonserver:26.07-py3

FROM ${TRITON}
USER 0
COPY --chmod=755 http-ok /usr/local/bin/
COPY hooks.txt /tmp/hooks.txt
RUN pip install --no-cache-dir --disable-pip-version-check -r /tmp/hooks.txt && rm /tmp/hooks.txt
# triton-server, as the base calls it
USER 1000:1000
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["http-ok", "http://127.0.0.1:8000/v2/health/ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tritonserver"]
CMD ["--model-repository=/models", "--disable-auto-complete-config", "--model-control-mode=none"]
