# A model repository as an image volume (`serve deploy render --storage image:…`): files alone, nothing to run.
# docker buildx build -f …/models.Dockerfile --provenance=true REPOSITORY
FROM scratch
COPY . /
