import { defineConfig } from "vite";

// The binary serves what lands in dist. Nothing is inlined: the page's policy allows neither data: fonts nor inline
// scripts. public/placeholder.txt is copied into dist, which is emptied first, so that the tracked copy stays there.
export default defineConfig({
  build: {
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
  },
  server: {
    port: 4181,
    proxy: { "/v1": { target: "http://127.0.0.1:4180", ws: true } },
  },
});
