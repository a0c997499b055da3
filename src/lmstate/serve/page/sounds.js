// Sounds for a message: files, which the browser turns into WAV where they are something else, and what a microphone hears.

const RATE = 16_000; // samples per second of what the browser decodes

export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);

/** A file of sound as WAV of whole numbers; one that is such a file stays as it is. */
export async function asWav(file) {
  const bytes = await file.arrayBuffer();
  if (isWhole(new DataView(bytes))) return new File([bytes], file.name, { type: "audio/wav" });
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes);
  } catch {
    throw new Error(`${file.name || "The sound"} is damaged, or no sound that this browser can read.`);
  }
  return new File([written(sound)], file.name, { type: "audio/wav" });
}

/** Whether these are the bytes of a WAV file of whole numbers. */
function isWhole(view) {
  const text = (at) => (view.byteLength < at + 4 ? "" : String.fromCharCode(...Array.from({ length: 4 }, (_, i) => view.getUint8(at + i))));
  return text(0) === "RIFF" && text(8) === "WAVE" && text(12) === "fmt " && view.byteLength > 22 && view.getUint16(20, true) === 1;
}

/** Its channels, averaged, as a WAV file of 16 bits. */
function written(sound) {
  const channels = Array.from({ length: sound.numberOfChannels }, (_, at) => sound.getChannelData(at));
  const view = new DataView(new ArrayBuffer(44 + 2 * sound.length));
  const text = (at, said) => [...said].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  text(8, "WAVEfmt ");
  [[16, 16], [24, RATE], [28, 2 * RATE], [40, 2 * sound.length]].forEach(([at, value]) => view.setUint32(at, value, true));
  [[20, 1], [22, 1], [32, 2], [34, 16]].forEach(([at, value]) => view.setUint16(at, value, true));
  text(36, "data");
  for (let at = 0; at < sound.length; at += 1) {
    const mean = channels.reduce((sum, one) => sum + one[at], 0) / channels.length;
    view.setInt16(44 + 2 * at, Math.round(Math.max(-1, Math.min(1, mean)) * 32767), true);
  }
  return view.buffer;
}

/** What the microphone hears from now on: `stop()` resolves to a file of it. Rejects where it is not allowed. */
export async function record() {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch {
    throw new Error("The microphone cannot be used: connect one, and allow it for this page.");
  }
  const recorder = new MediaRecorder(stream), parts = [];
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  const ended = new Promise((resolve) => recorder.addEventListener("stop", resolve));
  recorder.start();
  return {
    stop: async () => {
      if (recorder.state !== "inactive") recorder.stop();
      await ended;
      stream.getTracks().forEach((track) => track.stop());
      return asWav(new File(parts, "Recording", { type: recorder.mimeType }));
    },
  };
}
