#!/bin/bash
# What an operator does on a machine with systemd, from installing the package to removing it. It runs on that machine;
# /install.sh has the commands of docs/install.md.
set -eux
trap 'journalctl --no-pager -u ntf-server; systemctl poweroff' EXIT
cd /

pid() { systemctl show ntf-server -p MainPID --value; }
soon() { timeout 60 bash -c "until $1; do sleep 0.1; done"; }
logged() { soon "journalctl -u ntf-server -o json | grep -q '$1'"; }
runs() { systemctl is-active ntf-server && [ "$(stat -c %U "/proc/$(pid)")" = ntf-server ] && ntf-server status; }

bash -eux /install.sh
runs
ntf-server doctor

systemctl reload ntf-server
logged "reloaded: certificate"

: "killed: it is started again"
before=$(pid)
kill -9 "$before"
soon "[ \$(systemctl show ntf-server -p NRestarts --value) = 1 ] && systemctl is-active ntf-server"
[ "$(pid)" != "$before" ]

: "hangs: the watchdog ends it"
mkdir /etc/systemd/system/ntf-server.service.d
printf '[Service]\nWatchdogSec=2\nEnvironment=NTF_LOG_FORMAT=journald\n' >/etc/systemd/system/ntf-server.service.d/test.conf
systemctl daemon-reload
systemctl restart ntf-server
logged '"LOGGER":"ntf_server.daemon"'
kill -STOP "$(pid)"
logged "Watchdog timeout"
soon "systemctl is-active ntf-server"
runs

: "the same package once more, as an upgrade"
before=$(pid)
apt-get install --reinstall -y ./ntf-server_*.deb
[ "$(pid)" != "$before" ]
runs

: "what root does while it is stopped does not get in its way"
systemctl stop ntf-server
[ "$(systemctl show ntf-server -p Result -p ExecMainStatus --value | tr '\n' ' ')" = "success 0 " ]
journalctl -u ntf-server -o cat _COMM=python | tail -n 1 | grep -x stopped
ntf-server doctor
ntf-server backup /backup
systemctl start ntf-server
runs

: "removed: identity and data stay"
apt-get purge -y ntf-server
[ ! -e /usr/bin/ntf-server ] && [ ! -e /opt/ntf-server/bin ]
[ -e /etc/ntf-server/ca.crt ] && [ -e /var/lib/ntf-server/ntf-server.db ]
echo "all is well"
