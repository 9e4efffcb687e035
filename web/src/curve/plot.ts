// A plot in the page: it lives as long as its frame, follows its size and the colours of the page.

import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

/** `options` are read when the plot is made: when its frame is there, and when `isEmpty` or `kind` changes. */
export function usePlot(
  frame: RefObject<HTMLDivElement | null>,
  options: (frame: HTMLElement) => uPlot.Options,
  data: uPlot.AlignedData,
  isEmpty: boolean,
  kind = "",
): void {
  const plot = useRef<uPlot | null>(null);
  useEffect(() => {
    const element = frame.current;
    if (!element || isEmpty) return;
    const built = new uPlot(options(element), data, element);
    plot.current = built;
    const resized = new ResizeObserver(() => built.setSize({ width: element.clientWidth, height: element.clientHeight }));
    resized.observe(element);
    const recoloured = watchColours(() => built.redraw());
    return () => {
      resized.disconnect();
      recoloured();
      built.destroy();
      plot.current = null;
    };
  }, [isEmpty, kind]);
  useEffect(() => plot.current?.setData(data), [data]);
}

/** Resolves a custom property to a colour that a canvas understands (light-dark() included). */
export function colourReader(within: HTMLElement): (name: string) => string {
  const probe = document.createElement("i");
  probe.hidden = true;
  within.append(probe);
  return (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
}

function watchColours(redraw: () => void): () => void {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = new MutationObserver(redraw);
  chosen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  system.addEventListener("change", redraw);
  return () => {
    chosen.disconnect();
    system.removeEventListener("change", redraw);
  };
}
