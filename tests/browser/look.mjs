// look.mjs URL FOLDER TEXT: opens the page, says "open", waits until TEXT is on it, without reloading; takes
// screenshots and prints what axe found, what was fetched and whether anything sticks out, as JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, folder, text] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: quiet });
const result = { fetched: [], loads: 0, looks: [], errors: [] };
try {
  const page = await browser.newPage({ viewport: { width: 1100, height: 900 }, colorScheme: "light" });
  page.on("request", (request) => result.fetched.push(request.url()));
  page.on("load", () => result.loads++);
  page.on("pageerror", (error) => result.errors.push(String(error)));
  page.on("console", (said) => said.type() === "error" && result.errors.push(said.text())); // also what the page's policy forbids
  await page.goto(url);
  await page.getByText("takes pushes").first().waitFor();
  console.log("open");
  await page.getByText(text).first().waitFor({ timeout: 60000 });
  for (const [name, width, colorScheme] of [["wide-light", 1100, "light"], ["wide-dark", 1100, "dark"], ["phone-light", 360, "light"], ["phone-dark", 360, "dark"]]) {
    await page.setViewportSize({ width, height: 900 });
    await page.emulateMedia({ colorScheme });
    await page.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
    await page.evaluate(axe); // a script tag is what the page's policy forbids
    const found = await page.evaluate(() => globalThis.axe.run());
    result.looks.push({ name, wider: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth),
      violations: found.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" ")}`) });
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify(result));
