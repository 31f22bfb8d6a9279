# offbeat on a CPU. The directory it is started in is mounted: recipes are there, and runs are written there.
#   docker build -t offbeat .
#   docker run --rm -it --shm-size 2g --user "$(id -u)" -v "$PWD:/workspace" offbeat init
#   docker run --rm -it --shm-size 2g --user "$(id -u)" -v "$PWD:/workspace" offbeat train recipe.yaml
# Another build of torch: --build-arg TORCH_INDEX=URL.
FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY offbeat offbeat
COPY models/tiny-addition models/tiny-addition
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /dist/
RUN pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' /dist/constraints.txt)"
COPY --from=build /dist/*.whl /dist/
RUN pip install --no-cache-dir --constraint /dist/constraints.txt "$(echo /dist/*.whl)[ray]" && rm -r /dist
# Any user may run it: Ray and torch write their caches below HOME.
ENV HOME=/var/tmp
WORKDIR /workspace
ENTRYPOINT ["offbeat"]
CMD ["--help"]
