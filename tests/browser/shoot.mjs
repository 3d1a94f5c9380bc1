// shoot.mjs URL FILE WIDTH HEIGHT SCHEME [TEXT]: one picture as WebP, when TEXT is on the page. HEIGHT 0: all of the page.
import { writeFileSync } from "node:fs";
import { chromium } from "playwright-core";

const [url, file, width, height, colorScheme, text] = process.argv.slice(2);
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: quiet });
try {
  const page = await browser.newPage({ viewport: { width: +width, height: +height || 900 }, colorScheme });
  await page.goto(url);
  if (text) await page.getByText(text).first().waitFor();
  const tall = +height || await page.evaluate(() => document.documentElement.scrollHeight);
  await page.setViewportSize({ width: +width, height: tall });
  const session = await page.context().newCDPSession(page);
  const { data } = await session.send("Page.captureScreenshot", { format: "webp", quality: 80 });
  writeFileSync(file, Buffer.from(data, "base64"));
} finally {
  await browser.close();
}
