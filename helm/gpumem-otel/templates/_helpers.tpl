{{- define "gpumem-otel.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 52 characters: the names of the objects add up to eleven to it. */}}
{{- define "gpumem-otel.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Labels of every object: list of the root and of labels of its own. None of the chart's is ever in a
selector: what selects objects of this chart does so by a label of its own.
*/}}
{{- define "gpumem-otel.labels" -}}
{{- $root := index . 0 -}}
{{- $chart := dict
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
  "app.kubernetes.io/name" (include "gpumem-otel.name" $root)
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
-}}
{{- merge $chart (index . 1) $root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* Cluster-wide names: two releases of one name may live in two namespaces. */}}
{{- define "gpumem-otel.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "gpumem-otel.fullname" .) -}}
{{- end -}}

{{- define "gpumem-otel.tokenSecret" -}}
{{- default (printf "%s-token" (include "gpumem-otel.fullname" .)) .Values.token.existingSecret -}}
{{- end -}}

{{- define "gpumem-otel.injectImage" -}}
{{- with .Values.inject.image -}}
{{- $repository := required "inject.image.repository is needed: the image built from helm/inject/Dockerfile" .repository -}}
{{- if .digest -}}
{{- printf "%s@%s" $repository .digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpumem-otel.alloyImage" -}}
{{- with .Values.alloy.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository .tag -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Settings of every injected pod, as a list of name and value. $(...) is filled in by the kubelet. */}}
{{- define "gpumem-otel.injectEnv" -}}
{{- $env := list (list "GPUMEM_OTEL_SERVE" "1") (list "GPUMEM_OTEL_HOST" "$(POD_IP)") -}}
{{- $env = append $env (list "GPUMEM_OTEL_PORT" (.Values.port | int | toString)) -}}
{{- if .Values.token.enabled -}}
{{- $env = append $env (list "GPUMEM_OTEL_TOKEN_FILE" (printf "/gpumem-otel-token/%s" .Values.token.key)) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .Values.inject.env -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "inject.env has %s twice" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- $env = append $env (list .name .value) -}}
{{- end -}}
{{- toJson $env -}}
{{- end -}}
