"""Support for pictures, videos and sounds in prompts; text-only models do not need it.

The engine uses it in three modules:

- `engine.loading` loads a multimodal checkpoint: `packages`, `loading`;
- `engine.media` turns a conversation with media into a prompt: `options`, `parts`, `loader`,
  `rendering`, `prompt`;
- `engine.build` gives the runner what adds media to a step: `step_media`, `memory`.
"""
