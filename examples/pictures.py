"""Asks three questions about a picture in one batch; the vision tower runs once for all of them.

$ pip install --no-deps mlx-vlm==0.7.10    # beside the extra `vision`
$ python examples/pictures.py [MODEL]
"""

import sys

from mlx_paged import LLM, SamplingParams
from mlx_paged.demo import vision_model_path
from PIL import Image, ImageDraw

picture = Image.new("RGB", (256, 256), "white")
draw = ImageDraw.Draw(picture)
draw.rectangle((20, 30, 100, 110), fill="red")
draw.rectangle((150, 40, 230, 120), fill="red")
draw.ellipse((80, 150, 170, 240), fill="blue")

QUESTIONS = [
    "How many squares are there?",
    "What color is the circle?",
    "What is in this picture?",
]

# The embedded vision model knows shapes, colors and digits, and nothing else.
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else vision_model_path())
chats = [
    [{"role": "user", "content": [{"type": "image", "image": picture}, question]}]
    for question in QUESTIONS
]
outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48))

for question, output in zip(QUESTIONS, outputs):
    print(f"{question} {output.outputs[0].text}")
print(f"# the vision tower ran {llm.stats().encoder_cache.num_encoded_items} time")
