// What both pages are looked at with: Chromium, screenshots in two widths and two themes, axe.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const LOOKS = [["wide-light", 1100, "light"], ["wide-dark", 1100, "dark"], ["phone-light", 360, "light"], ["phone-dark", 360, "dark"]];

export const launch = () => chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: quiet });

// Takes a screenshot of each look; says what axe found and by how much the page is wider than the window.
export const look = async (page, folder, prefix = "") => {
  const looks = [];
  for (const [name, width, colorScheme] of LOOKS) {
    await page.setViewportSize({ width, height: 900 });
    await page.emulateMedia({ colorScheme });
    await page.screenshot({ path: `${folder}/${prefix}${name}.png`, fullPage: true });
    await page.evaluate(axe); // a script tag is what a page's policy may forbid
    const found = await page.evaluate(() => globalThis.axe.run());
    looks.push({ name, wider: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth),
      violations: found.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" ")}`) });
  }
  return looks;
};
