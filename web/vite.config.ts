import { defineConfig } from "vite";

// Relative URLs: the page works whatever path or port serves it. No inline assets: the server sends a strict
// Content-Security-Policy. During development, tests/browser/show.py answers /api and /v1.
export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir: "../neuroshard/api/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // keeps light-dark() as written
    reportCompressedSize: true,
  },
  server: {
    proxy: {
      "/api": "http://127.0.0.1:8123",
      "/v1": "http://127.0.0.1:8123",
      "/health": "http://127.0.0.1:8123",
    },
  },
});
