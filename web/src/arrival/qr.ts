// Reads QR codes: with the browser's own detector where it has one, otherwise with a library that is loaded on demand.

interface Detector {
  detect: (image: ImageBitmapSource) => Promise<{ rawValue: string }[]>;
}

interface DetectorClass {
  new (options: { formats: ["qr_code"] }): Detector;
  getSupportedFormats: () => Promise<readonly string[]>;
}

/** Longest sides at which a picture is tried, in pixels: a photo of a screen often reads better when it is smaller. */
const SIDES = [2000, 1200, 700, 400];
const LOOK_MS = 150;

async function newDetector(): Promise<Detector> {
  const own = (globalThis as { BarcodeDetector?: DetectorClass }).BarcodeDetector;
  const hasOwn = own !== undefined && (await own.getSupportedFormats()).includes("qr_code");
  const Class: DetectorClass = hasOwn ? own : (await import("qr/decode.js")).BarcodeDetector;
  return new Class({ formats: ["qr_code"] });
}

/** The text of the QR code in a picture; null without one. Rejects if the file is not a picture. */
export async function textOfPicture(file: Blob): Promise<string | null> {
  const picture = new Image(); // unlike a bitmap of the file, it also reads SVG, as `neuroshard run invite --qr` writes it
  picture.src = await dataAddress(file);
  await picture.decode();
  const detector = await newDetector();
  const longest = Math.max(picture.naturalWidth, picture.naturalHeight);
  for (const side of SIDES.filter((one, index) => one < longest || index === SIDES.length - 1)) {
    const scale = Math.min(1, side / longest);
    const smaller = await createImageBitmap(picture, {
      resizeWidth: Math.max(1, Math.round(picture.naturalWidth * scale)),
      resizeHeight: Math.max(1, Math.round(picture.naturalHeight * scale)),
      resizeQuality: "high",
    });
    const [found] = await detector.detect(smaller);
    smaller.close();
    if (found) return found.rawValue;
  }
  return null;
}

/** A file as a data: address: the page may show such pictures and those of its own server, and no others. */
function dataAddress(file: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export async function hasCamera(): Promise<boolean> {
  // Browsers hide the camera from pages that are not of this computer and not encrypted.
  const devices = await navigator.mediaDevices?.enumerateDevices();
  return devices?.some(({ kind }) => kind === "videoinput") ?? false;
}

/** Shows the camera in `video` until `ended`, and hands on the first QR code. Rejects if there is no picture. */
export async function scan(video: HTMLVideoElement, ended: AbortSignal, onText: (text: string) => void): Promise<void> {
  const size = { width: { ideal: 1920 }, height: { ideal: 1080 } }; // an invitation has many small squares
  const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", ...size } });
  try {
    const detector = await newDetector();
    if (ended.aborted) return;
    video.srcObject = stream;
    await video.play();
    while (!ended.aborted) {
      const [found] = video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA ? await detector.detect(video) : [];
      if (found && !ended.aborted) return onText(found.rawValue);
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  } finally {
    for (const track of stream.getTracks()) track.stop();
  }
}
