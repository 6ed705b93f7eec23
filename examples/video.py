"""Describes a frame of each second of a video, all in one batch.

$ pip install --no-deps mlx-vlm==0.7.10    # beside the extra `vision`
$ python examples/video.py [VIDEO [MODEL]]

The embedded model sees pictures only. Models of videos take all frames as one part of a message:
{"type": "video", "video": Path("clip.mp4")}.
"""

import sys
import tempfile
from pathlib import Path

import av
from mlx_paged import LLM, SamplingParams
from mlx_paged.demo import vision_model_path
from PIL import Image, ImageDraw


def write_clip(path: Path) -> None:
    """Two seconds of a red circle, then two of a blue square, at 10 frames a second."""
    with av.open(path, "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 256
        for number in range(40):
            image = Image.new("RGB", (256, 256), "white")
            draw = ImageDraw.Draw(image)
            if number < 20:
                draw.ellipse((70, 70, 190, 190), fill="red")
            else:
                draw.rectangle((70, 70, 190, 190), fill="blue")
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())


if len(sys.argv) > 1:
    clip = Path(sys.argv[1])
else:
    clip = Path(tempfile.mkdtemp(), "clip.mp4")
    write_clip(clip)

with av.open(clip) as file:
    frames = [(frame.time, frame.to_image()) for frame in file.decode(video=0)][::10]

llm = LLM(sys.argv[2] if len(sys.argv) > 2 else vision_model_path())
question = "What is in this picture?"
chats = [
    [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
    for _, image in frames
]
outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48))
for (seconds, _), output in zip(frames, outputs):
    print(f"{seconds:4.1f} s  {output.outputs[0].text}")
