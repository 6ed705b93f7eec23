"""`mlx-paged bench media`: images and videos, compared with mlx-vlm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged import private_folder
from mlx_paged.bench.results import check_writable, checkout, write_json
from mlx_paged.cli.bench.options import ListOf, at_least, list_option, parse_list
from mlx_paged.cli.options import DType
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra

if TYPE_CHECKING:
    from mlx_paged.bench.remote import Remote

# Tokens of questions and templates, besides those of the media.
_TEXT_TOKENS = 512
_MAX_ROWS = 16


def media(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model directory or Hugging Face id.", show_default="the embedded vision model"
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights in the shape of smolvlm-256m or qwen2-vl-2b, instead of a model."
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Layers of the shape's language model; its tower shrinks likewise."
        ),
    ] = None,
    dtype: Annotated[
        DType, typer.Option(help="Data type of the weights. auto: as stored, float32 on the CPU.")
    ] = "auto",
    image_size: Annotated[
        ListOf, list_option(None, "Image width and height in pixels.", "224,448")
    ] = None,
    frames: Annotated[ListOf, list_option(None, "Frames per video.", "2,4")] = None,
    frame_size: Annotated[int, typer.Option(min=28, help="Frame width in pixels.")] = 224,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 32,
    num_iters: Annotated[
        int, typer.Option(min=1, help="Measured rounds, after one for warm-up.")
    ] = 3,
    tables: Annotated[
        bool, typer.Option("--tables/--no-tables", help="Measure images and videos.")
    ] = True,
    figures: Annotated[
        bool,
        typer.Option(
            "--figures",
            help="Also measure eight questions about one image, a chat's second turn, and "
            "the cost to text-only requests.",
        ),
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Compare with mlx-vlm.")
    ] = True,
    servers: Annotated[
        bool,
        typer.Option("--servers", help="Compare the servers, too. mlx-vlm's needs more packages."),
    ] = False,
    output_json: Annotated[
        Path | None,
        typer.Option("--output-json", "--output", help="JSON file for results and environment."),
    ] = None,
) -> None:
    """Measure images and videos: time to first token, tokens per second and memory.

    Each engine is asked about a new image or video, and then a second question
    about the same one: with everything that it may cache between requests, with
    the outputs of towers only, and with nothing. Each engine has its own
    process, and they take turns. A request's clock starts before its images are
    read. Models that do not accept videos get the frames as images.
    Options with LIST may be repeated or take commas.

    Examples:
      mlx-paged bench media
      mlx-paged bench media --shape qwen2-vl-2b --num-layers 4 --image-size 224,448,896
      mlx-paged bench media --tables --figures --output-json media.json
    """
    sizes = parse_list("image_size", image_size, *at_least(1)) or [224, 448]
    counts = parse_list("frames", frames, *at_least(1)) or [2, 4]
    check_writable("output_json", output_json)
    if model is not None and shape is not None:
        raise InvalidParameterError("shape", "left out with --model", shape)
    if num_layers is not None and shape is None:
        raise InvalidParameterError("num_layers", "left out without --shape", num_layers)
    if not (tables or figures or servers):
        raise InvalidParameterError("tables", "on without --figures and --servers", tables)
    checkout()
    with needs_extra("vision", "mlx-paged bench media"):
        import PIL  # noqa: F401

        from mlx_paged.multimodal.mlx_vlm import import_mlx_vlm

        import_mlx_vlm()
    from mlx_paged.bench import media_engines, media_runs
    from mlx_paged.multimodal.mlx_vlm import MLX_VLM_VERSION

    if servers and compare:
        media_engines.check_server_packages()
    said = None if shape is None else "Three red circles."
    settings = media_runs.Settings(output_len, num_iters, said)
    with private_folder.temporary() as folder:
        path = _model(model, shape, num_layers, dtype, folder)
        pictures = media_runs.Pictures(folder)
        found: dict[str, Any] = {
            "benchmark": "media",
            "model": path if model is not None else shape or "embedded vision model",
            "num_layers": num_layers,
            "dtype": dtype,
            "mlx_vlm_version": MLX_VLM_VERSION,
            "output_len": output_len,
            "num_iters": num_iters,
        }
        max_tokens = _max_tokens(sizes, counts, frame_size, output_len)

        def save() -> None:
            if output_json is not None:
                write_json(output_json, found)

        if tables or figures:
            with _opened(path, dtype, max_tokens, compare) as engines:
                kinds = engines[media_runs.PAGED].ask("kinds")
                if tables:
                    found["pictures"] = media_runs.picture_rows(engines, pictures, sizes, settings)
                    _print(media_runs.rows_text(found["pictures"], "size", "Pictures"))
                    found["videos"] = media_runs.video_rows(
                        engines,
                        pictures,
                        frame_size,
                        counts,
                        settings,
                        takes_videos="video" in kinds,
                    )
                    how = "Videos" if "video" in kinds else "Frames, as pictures of one prompt"
                    _print(media_runs.rows_text(found["videos"], "frames", how))
                    save()
                if figures:
                    found["figures"] = media_runs.figures(
                        engines, pictures, sizes[-1], settings, _MAX_ROWS // 2
                    )
                    _print(media_runs.figures_text(found["figures"]))
                    save()
        if servers:
            found["servers"] = _servers(path, compare, pictures, sizes, settings)
            _print(media_runs.rows_text(found["servers"], "size", "Servers"))
            save()


def _print(text: str) -> None:
    typer.echo(text + "\n")


def _model(
    model: str | None, shape: str | None, num_layers: int | None, dtype: str, folder: Path
) -> str:
    """Returns the directory or id of the model; writes a checkpoint for a shape."""
    if shape is None:
        from mlx_paged.demo import vision_model_path

        return model or str(vision_model_path())
    from mlx_paged.bench.media_shapes import Shape, write_checkpoint
    from mlx_paged.platform import is_cpu_default, use_supported_device

    # isort: split
    import mlx.core as mx

    names = [each.value for each in Shape]
    if shape not in names:
        raise InvalidParameterError("shape", " or ".join(names), shape)
    use_supported_device()
    if dtype == "auto":
        dtype = "float32" if is_cpu_default() else "bfloat16"
    path = write_checkpoint(folder / shape, Shape(shape), num_layers=num_layers, dtype=dtype)
    mx.clear_cache()
    return str(path)


def _max_tokens(
    sizes: Sequence[int], counts: Sequence[int], frame_size: int, output_len: int
) -> int:
    """Returns the maximum tokens of a request: at least 64 per image, one per 28 x 28 pixels."""
    of_picture = max(max(64, (size // 28 + 1) ** 2) + 128 for size in sizes)
    of_video = max(counts) * (max(64, (frame_size // 28 + 1) ** 2) + 128)
    return max(of_picture, of_video) + 8 * output_len + _TEXT_TOKENS


@contextlib.contextmanager
def _opened(path: str, dtype: str, max_tokens: int, compare: bool) -> Iterator[dict[str, Remote]]:
    from mlx_paged.bench import media_engines, media_runs
    from mlx_paged.bench.remote import Remote

    makers: dict[str, tuple[Any, ...]] = {
        media_runs.PAGED: (media_engines.PagedEngines, path, dtype, max_tokens, _MAX_ROWS)
    }
    if compare:
        makers[media_runs.VLM] = (media_engines.VlmEngine, path, dtype)
    # Starts mostly import and read files, so they run concurrently.
    with ThreadPoolExecutor(len(makers)) as pool:
        starts = {name: pool.submit(Remote, name, *make) for name, make in makers.items()}
    try:
        yield {name: start.result() for name, start in starts.items()}
    finally:
        for start in starts.values():
            if start.exception() is None:
                start.result().close()


def _servers(
    path: str, compare: bool, pictures: Any, sizes: Sequence[int], settings: Any
) -> list[Mapping[str, Any]]:
    from mlx_paged.bench import media_engines, media_runs

    opened: dict[str, Any] = {}
    try:
        for name in (media_runs.PAGED, media_runs.VLM) if compare else (media_runs.PAGED,):
            opened[name] = media_engines.open_server(name, path)
        return media_runs.server_rows(opened, pictures, sizes, settings)  # type: ignore[return-value]
    finally:
        for server in opened.values():
            server.close()
