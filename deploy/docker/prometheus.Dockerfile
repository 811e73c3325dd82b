# Debian's Prometheus, beside the pods that Podman plays (`make images`).
# Pin the base by its digest: --build-arg DEBIAN=debian@sha256:…
ARG DEBIAN=debian:bookworm-slim

FROM ${DEBIAN}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="compress-serve Prometheus" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Of no day: what a package's own user is made with stands in /etc/shadow.
# hadolint ignore=DL3008
RUN apt-get update \
    && SOURCE_DATE_EPOCH=0 DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus python3-minimal \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/ldconfig/aux-cache /etc/prometheus/* \
    && install --directory --owner=1000 --group=1000 /prometheus
COPY --chmod=755 deploy/docker/http-ok /usr/local/bin/
USER 1000:1000
EXPOSE 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["http-ok", "http://127.0.0.1:9090/-/ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
