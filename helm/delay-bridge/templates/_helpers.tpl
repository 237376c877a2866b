{{- define "delay-bridge.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* 52 characters: the pods' names, labels of their controller revision and the volumes' names come on top. A service's
name begins with a letter and has no dot; a release's name may be otherwise. */}}
{{- define "delay-bridge.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- $full = default $full .Values.fullnameOverride | replace "." "-" }}
{{- $full = ternary $full (printf "%s-%s" .Chart.Name $full) (regexMatch "^[a-z]" $full) }}
{{- $full | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "delay-bridge.selectorLabels" -}}
app.kubernetes.io/name: {{ include "delay-bridge.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "delay-bridge.labels" -}}
{{ include "delay-bridge.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- end }}

{{- define "delay-bridge.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "delay-bridge.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "delay-bridge.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* The configuration: values.config through tpl, with the files of the mounted secrets and the pods as peers where it
names none itself. A certificate may lack the pods' names, and a bridge takes 64 peers at most. */}}
{{- define "delay-bridge.config" -}}
{{- $config := tpl (toYaml .Values.config) . | fromYaml }}
{{- if hasKey $config "Error" }}
{{- fail (printf "config is not YAML once its templates are filled in: %s" $config.Error) }}
{{- end }}
{{- /* Helm merges maps: a default in values.yaml would stay beside the topics that a user names. */}}
{{- if not $config.delay_topics }}
{{- $_ := unset $config "delay_topics" }}
{{- end }}
{{- $files := dict }}
{{- with .Values.kafka.sasl }}
{{- if .existingSecret }}
{{- $_ := set $files "sasl.username" (printf "${file:/etc/delay-bridge/sasl/%s}" .usernameKey) }}
{{- $_ := set $files "sasl.password_file" (printf "/etc/delay-bridge/sasl/%s" .passwordKey) }}
{{- end }}
{{- end }}
{{- with .Values.kafka.tls }}
{{- if .existingSecret }}
{{- range $property, $key := dict "ssl.ca.location" .caKey "ssl.certificate.location" .certKey "ssl.key.location" .keyKey }}
{{- if $key }}
{{- $_ := set $files $property (printf "/etc/delay-bridge/tls/%s" $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $common := mergeOverwrite $files $config.kafka.common }}
{{- $_ := set $config.kafka "common" $common }}
{{- $http := $config.http }}
{{- with .Values.api }}
{{- if .existingSecret }}
{{- if .tokenKey }}
{{- $_ := set $http "token_file" (printf "/etc/delay-bridge/api/%s" .tokenKey) }}
{{- end }}
{{- if .passwordKey }}
{{- $_ := set $http "user" (default (printf "${file:/etc/delay-bridge/api/%s}" .usernameKey) $http.user) }}
{{- $_ := set $http "password_file" (printf "/etc/delay-bridge/api/%s" .passwordKey) }}
{{- end }}
{{- end }}
{{- end }}
{{- $replicas := int .Values.replicas }}
{{- if not (or (lt $replicas 2) (gt $replicas 64) (eq $http.api "off") $http.certificate_file (hasKey $http "peers")) }}
{{- $name := include "delay-bridge.fullname" . }}
{{- $peers := list }}
{{- range until $replicas }}
{{- $peers = append $peers (printf "http://%s-%d.%s.%s.svc:%d" $name . $name $.Release.Namespace (int $http.api_port)) }}
{{- end }}
{{- $_ := set $http "peers" $peers }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- define "delay-bridge.scheme" -}}
{{- $http := (include "delay-bridge.config" . | fromYaml).http }}
{{- ternary "HTTPS" "HTTP" (not (empty $http.certificate_file)) }}
{{- end }}

{{- /* A size as the bridge or Kubernetes writes it, in MiB. */}}
{{- define "delay-bridge.mebibytes" -}}
{{- $text := toString . }}
{{- $number := regexFind "^[0-9.]+" $text | float64 }}
{{- $unit := regexFind "[A-Za-z]*$" $text | trimSuffix "B" }}
{{- $kibi := dict "" 0.0009765625 "K" 0.9765625 "k" 0.9765625 "Ki" 1.0 "M" 976.5625 "Mi" 1024.0 "G" 976562.5 "Gi" 1048576.0 "T" 976562500.0 "Ti" 1073741824.0 }}
{{- if not (hasKey $kibi $unit) }}
{{- fail (printf "%s is not a size that this chart understands; write it as 512Mi or 2Gi" $text) }}
{{- end }}
{{- divf (mulf $number (get $kibi $unit)) 1024.0 | floor | int64 }}
{{- end }}

{{- /* Checks beyond the schema. */}}
{{- define "delay-bridge.validate" -}}
{{- $config := include "delay-bridge.config" . | fromYaml }}
{{- if not (index $config.kafka.common "bootstrap.servers") }}
{{- fail "config.kafka.common.\"bootstrap.servers\" is empty: name your brokers, host:port" }}
{{- end }}
{{- if not (int $config.http.port) }}
{{- fail "config.http.port is 0: probes need a port that is known beforehand" }}
{{- end }}
{{- if and (ne $config.http.api "off") (not (int $config.http.api_port)) }}
{{- fail "config.http.api_port is 0: the service needs a port that is known beforehand; or set config.http.api to off" }}
{{- end }}
{{- if not (hasPrefix "/" $config.store.directory) }}
{{- fail (printf "config.store.directory %s is not absolute: the volume is mounted there" $config.store.directory) }}
{{- end }}
{{- if and (or .Values.api.service.enabled .Values.api.ingress.enabled) (eq $config.http.api "off") }}
{{- fail "api.service and api.ingress lead to the HTTP API, and config.http.api is off" }}
{{- end }}
{{- if and .Values.api.ingress.enabled (not .Values.api.ingress.hosts) }}
{{- fail "api.ingress.hosts is empty: name the hosts at which the page and the API answer" }}
{{- end }}
{{- if and .Values.api.ingress.enabled (not (or $config.http.user $config.http.token_file $config.http.certificate_file)) }}
{{- /* Or the controller names the service: bridge/api/guard.py has these names. */}}
{{- $names_service := contains "upstream-vhost" (toJson .Values.api.ingress.annotations) }}
{{- range .Values.api.ingress.hosts }}
{{- if and (contains "." .) (not (regexMatch "\\.(localhost|svc|local|internal)$" .)) (not $names_service) }}
{{- fail (printf "api.ingress.hosts names %s, and without a password the API answers to no public name (status 421): set api.existingSecret, or config.http.user and config.http.password_file" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- with (.Values.resources.limits).memory }}
{{- $limit := include "delay-bridge.mebibytes" . | int }}
{{- $heap := include "delay-bridge.mebibytes" $config.spark.driver_memory | int }}
{{- if gt (add $heap 512) $limit }}
{{- fail (printf "config.spark.driver_memory %s leaves less than 512Mi of resources.limits.memory %s to Python and Arrow" $config.spark.driver_memory .) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Common mounts of the bridge and the test pod. */}}
{{- define "delay-bridge.mounts" -}}
- name: config
  mountPath: /etc/delay-bridge/bridge.yaml
  subPath: bridge.yaml
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- if .Values.kafka.sasl.existingSecret }}
- name: sasl
  mountPath: /etc/delay-bridge/sasl
  readOnly: true
{{- end }}
{{- if .Values.kafka.tls.existingSecret }}
- name: tls
  mountPath: /etc/delay-bridge/tls
  readOnly: true
{{- end }}
{{- if .Values.api.existingSecret }}
- name: api
  mountPath: /etc/delay-bridge/api
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end }}

{{- define "delay-bridge.volumes" -}}
- name: config
  configMap:
    name: {{ include "delay-bridge.fullname" . | quote }}
- name: tmp
  emptyDir:
    sizeLimit: {{ include "delay-bridge.quantity" .Values.scratch.tmpSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "delay-bridge.quantity" .Values.scratch.shmSize }}
{{- with .Values.kafka.sasl.existingSecret }}
- name: sasl
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- with .Values.kafka.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- with .Values.api.existingSecret }}
- name: api
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end }}

{{- /* Selector of the series of this release: Prometheus Operator's monitors add namespace and pod. */}}
{{- define "delay-bridge.series" -}}
{{- printf "namespace=%q, pod=~%q" .Release.Namespace (printf "%s-[0-9]+" (include "delay-bridge.fullname" .)) }}
{{- end }}

{{- /* The port of an address: its own, or that of its scheme. */}}
{{- define "delay-bridge.port" -}}
{{- $url := urlParse . }}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" }}
{{- default (ternary "443" "80" (eq $url.scheme "https")) $port }}
{{- end }}

{{- /* A quantity as Kubernetes reads it: YAML's whole numbers arrive as floating-point ones. */}}
{{- define "delay-bridge.quantity" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ int64 . | toString | quote }}{{ end }}
{{- end }}
