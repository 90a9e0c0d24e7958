// Where frames come from: the bundled scene, a video file, a webcam. Each source has an
// element to show, `draw(context, width, height)`, and `close()`.

import { el } from "./dom.js";
import { Scene } from "./scene.js";

/** A webcam that `take()`s JPEG files. Rejects with an Error that says why there is none. */
export async function openCamera() {
  const video = await startCamera();
  return {
    video,
    take: () => new Promise((resolve) => {
      const canvas = el("canvas", { width: video.videoWidth, height: video.videoHeight });
      canvas.getContext("2d").drawImage(video, 0, 0);
      canvas.toBlob(resolve, "image/jpeg", 0.92);
    }),
    close: () => stop(video),
  };
}

/** The source of that name: "scene", "camera", or a video file. */
export async function openSource(kind, file) {
  if (kind === "scene") return new Scene();
  const video = kind === "camera" ? await startCamera() : await startFile(file);
  const url = video.src;
  return {
    width: video.videoWidth,
    height: video.videoHeight,
    draw: (context, width, height) => context.drawImage(video, 0, 0, width, height),
    close: () => {
      stop(video);
      if (url) URL.revokeObjectURL(url);
    },
  };
}

async function startCamera() {
  if (!navigator.mediaDevices) {
    throw new Error("this page may not open a webcam: it is neither on localhost nor encrypted");
  }
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { width: 640, height: 480 } });
  } catch (error) {
    throw new Error(`the browser opened no webcam: ${error.message}`);
  }
  const video = el("video", { muted: true, playsInline: true, srcObject: stream, ariaLabel: "Webcam" });
  await video.play();
  return video;
}

async function startFile(file) {
  if (!file) throw new Error("choose a video file first");
  const video = el("video", { muted: true, playsInline: true, loop: true, src: URL.createObjectURL(file) });
  try {
    await video.play();
  } catch {
    throw new Error(`this browser cannot play ${file.name}`);
  }
  return video;
}

function stop(video) {
  video.pause();
  video.srcObject?.getTracks().forEach((track) => track.stop());
}
