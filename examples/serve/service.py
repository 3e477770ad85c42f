"""An exported model behind HTTP. `MODEL=runs/x/export uvicorn service:app`, then POST {"pixels": [...]} to /predict."""

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

FOLDER = Path(os.environ.get("MODEL", "export"))
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
SHAPE, NAMES = tuple(CONFIG["input"]["shape"][1:]), CONFIG["class_names"]
LARGEST = 10_000_000  # bytes of a request
model = onnxruntime.InferenceSession(FOLDER / "model.onnx", providers=["CPUExecutionProvider"])
app = FastAPI(title="An exported model")


@app.post("/predict")
async def predict(request: Request) -> dict[str, list]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise HTTPException(413, f"more than {LARGEST} bytes are too many for one request")
    try:
        pixels = np.array(json.loads(body)["pixels"], dtype=np.float32)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        raise HTTPException(400, 'send JSON such as {"pixels": [[[[0.0, 1.0], [0.5, 0.25]]]]}') from None
    if pixels.shape[1:] != SHAPE or not len(pixels):
        raise HTTPException(422, f"got pixels of shape {pixels.shape}; expected (images, *{SHAPE})")
    if not (pixels.min() >= 0 and pixels.max() <= 1):  # nan is neither
        raise HTTPException(422, "pixels are numbers from 0 to 1: divide bytes by 255, and do not normalise them")
    (logits,) = await run_in_threadpool(model.run, None, {"pixels": pixels})
    return {"classes": [NAMES[place] for place in logits.argmax(axis=1)], "logits": logits.tolist()}
