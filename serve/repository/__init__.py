"""Model repositories on disk: read, versions, locks, checksums and signatures."""
