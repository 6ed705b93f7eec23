"""Pictures, videos and sounds in prompts: everything that serving text does without.

Three modules of the engine lead here:

- `engine.loading` loads a multimodal checkpoint: `packages`, `loading`;
- `engine.media` makes a prompt of a conversation with media: `options`, `parts`, `loader`,
  `rendering`, `prompt`;
- `engine.build` gives the runner what adds media to a step: `step_media`, `memory`.
"""
